"""Integrations: programs that run models, with sparse attention in them."""
