"""Prediction: which key blocks each query block needs, and how many."""
