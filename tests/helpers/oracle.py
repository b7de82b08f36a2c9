"""What the library must compute, written again from its definition: loops over tokens, float64, no code of src."""

import itertools
import math

import torch

REMOVED = -1e4


def blocks_of(n, size):
    return [range(i, min(i + size, n)) for i in range(0, n, size)]


def sides(block_size):
    """Tokens of a query block, of a key block."""
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


# --- token orders ----------------------------------------------------------------------------------------------------


def windows(t, h, w, window):
    """(frame, row, column) triples in the order of `window`."""
    wt, wh, _ = window

    def key(p):
        f, y, x = p
        band = (f // wt) * math.ceil(h / wh) + y // wh
        return band, (x if band % 2 == 0 else w - 1 - x), f % wt, y % wh

    return sorted(((f, y, x) for f in range(t) for y in range(h) for x in range(w)), key=key)


def tiles(h, w):
    """(row, column) pairs of one frame, in tiles of 8x8."""
    th, tw = h // 8 * 8, w // 8 * 8
    out = [(ty + y, tx + x) for ty in range(0, th, 8) for tx in range(0, tw, 8) for y in range(8) for x in range(8)]
    out += [(y, x) for y in range(th, h) for x in range(w)]
    out += [(y, x) for y in range(th) for x in range(tw, w)]
    return out


def raster(h, w):
    return [(y, x) for y in range(h) for x in range(w)]


def clip_parts(t, h, w, token_order, first_frame=True):
    """(tokens of the body, tokens of the first frame), as offsets from the clip's start."""
    first = raster(h, w)
    if not first_frame and token_order != "mindiesd":
        first = [(y, x) for _, y, x in windows(1, h, w, (1, 8, 16))]
    if token_order == "mindiesd" and h % 8 == 0 and w % 8 == 0:
        first = tiles(h, w)
    first = [y * w + x for y, x in first]
    if token_order == "mindiesd":
        if t == 1:
            return first, []
        return [f * h * w + y * w + x for f in range(1, t) for y, x in tiles(h, w)], first
    window = token_order if token_order != "window" else ((2, 8, 8) if t > 1 else (1, 8, 16))
    skip = 1 if t > 1 else 0
    body = [(f + skip) * h * w + y * w + x for f, y, x in windows(t - skip, h, w, window)]
    return body, first if t > 1 else []


def halves(places):
    """The tokens of `places`, (token, (frame, row, column)), halved across their longest side, down to 16."""
    if len(places) <= 16:
        return [token for token, _ in places]
    sides = [max(p[axis] for _, p in places) - min(p[axis] for _, p in places) for axis in range(3)]
    axis = sides.index(max(sides))
    places = sorted(places, key=lambda place: place[1][axis])
    middle = len(places) // 2
    return halves(places[:middle]) + halves(places[middle:])


def layout(
    seq_len, latent_shape=None, txt_len=0, video_spans=None, token_order="window", block_size=128, first_frame=True
):
    """-> (order, protected); first_frame: whether that of a video is protected."""
    if latent_shape is None and video_spans is None:
        order = list(range(seq_len))
        return order, [any(token < txt_len for token in block) for block in blocks_of(seq_len, block_size)]
    if token_order == "mindiesd" and video_spans is None:
        t, h, w = latent_shape
        body, first = clip_parts(t, h, w, token_order)
        order = [txt_len + i for i in (first + body if t > 1 else body)] + list(range(txt_len))
        n = math.ceil(seq_len / block_size)
        head = math.ceil(h * w / block_size) if t > 1 and first_frame else 0
        tail = math.ceil(txt_len / block_size)
        return order, [i < head or i >= n - tail for i in range(n)]

    spans = video_spans or [{"start": txt_len, "latent_shape": latent_shape}]
    owner = {}
    bodies, firsts, inside = [], [], set()
    for number, span in enumerate(spans):
        t, h, w = span["latent_shape"]
        body, first = clip_parts(t, h, w, token_order if token_order != "raster" else "window", first_frame)
        bodies += [span["start"] + i for i in body]
        firsts += [span["start"] + i for i in first]
        owner.update({span["start"] + i: number for i in (body if first_frame else body + first)})
        inside |= set(range(span["start"], span["start"] + t * h * w))
    context = [i for i in range(seq_len) if i not in inside]
    order = list(range(seq_len)) if token_order == "raster" else bodies + firsts + context
    if token_order not in ("raster", "mindiesd"):
        place = {}
        for span in spans:
            points = itertools.product(*map(range, span["latent_shape"]))
            place.update({span["start"] + i: point for i, point in enumerate(points)})
        for i in range(0, seq_len // 128 * 128, 128):
            block = order[i : i + 128]
            if len({owner.get(token, token) for token in block}) == 1:
                order[i : i + 128] = halves([(token, place[token]) for token in block])
    protected = []
    for block in blocks_of(seq_len, block_size):
        owners = {owner.get(order[i], "dense") for i in block}
        protected.append("dense" in owners or len(owners) > 1)
    return order, protected


# --- block masks -----------------------------------------------------------------------------------------------------


def kept_keys(attn_mask, batch, k_len):
    """bool [B, Sk], float64 [B, Sk]"""
    if attn_mask is None:
        return torch.ones(batch, k_len, dtype=torch.bool), torch.zeros(batch, k_len, dtype=torch.float64)
    attn_mask = attn_mask.reshape(batch, k_len)
    if attn_mask.dtype == torch.bool:
        return attn_mask, torch.zeros(batch, k_len, dtype=torch.float64)
    return attn_mask > REMOVED, attn_mask.double()


def budget(n, sparsity):
    return math.ceil(n * (1 - sparsity) - 1e-9)


def mean_scores(q, k, scale, order_q, order_k, keep, block_size):
    """float64 [B, Hq, NQ, NK]"""
    q, k = q.float().double(), k.float().double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q_size, k_size = sides(block_size)
    q_means = [q[:, :, [order_q[i] for i in block]].mean(2) for block in blocks_of(len(order_q), q_size)]
    scores = torch.empty(q.shape[0], q.shape[1], len(q_means), math.ceil(len(order_k) / k_size)).double()
    for b in range(q.shape[0]):
        for j, block in enumerate(blocks_of(len(order_k), k_size)):
            tokens = [order_k[i] for i in block if keep[b, order_k[i]]]
            for i, mean in enumerate(q_means):
                if tokens:
                    scores[b, :, i, j] = (mean[b] * k[b][:, tokens].mean(1)).sum(-1) * scale
                else:
                    scores[b, :, i, j] = -math.inf
    return scores


def part_mass(q, k, scale, order_q, order_k, keep, block_size):
    """float64 [B, Hq, NQ, NK]: softmax over parts of all blocks, those without a token left out, then sums.

    A part is a quarter of a query block, and as many tokens of a key block.
    """
    q_size, k_size = sides(block_size)
    part = q_size // 4
    n = k_size // part  # parts of a key block
    probs = mean_scores(q, k, scale, order_q, order_k, keep, part).softmax(-1).nan_to_num(0.0)
    rows, columns = math.ceil(len(order_q) / q_size), math.ceil(len(order_k) / k_size)
    mass = torch.empty(*probs.shape[:2], rows, columns).double()
    for i in range(rows):
        for j in range(columns):
            mass[:, :, i, j] = probs[:, :, 4 * i : 4 * i + 4, n * j : n * j + n].flatten(2).sum(2)
            for b in range(len(mass)):
                if not any(keep[b, order_k[t]] for t in range(j * k_size, min((j + 1) * k_size, len(order_k)))):
                    mass[b, :, :, j] = -math.inf
    return mass


def spread(keys):
    """float64: mean square of the distance of keys [n, D] to their mean."""
    return (keys - keys.mean(0)).square().sum(1).mean()


def mean_errors(q, k, scale, order_q, order_k, keep, block_size, compensate=False):
    """float64 [B, Hq, NQ, NK]: predictor="spread". What parts of 8 queries give a key block, times its spread.

    With `compensate` times its square, and the sum of all that a part gives is estimated from means of 128 keys, made
    of those of 32, unless it gives 32 keys more than 2^60 times as much.
    """
    q_size, k_size = sides(block_size)
    a, n = q_size // 8, k_size // 32  # parts of a query block, of a key block
    logits = mean_scores(q, k, scale, order_q, order_k, keep, (8, 32))
    keys = k.float().double()
    shared = q.shape[1] // k.shape[1]
    rows, blocks = math.ceil(len(order_q) / q_size), blocks_of(len(order_k), k_size)
    scores = torch.full((*logits.shape[:2], rows, len(blocks)), -math.inf).double()
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        part_means, lives = [], []
        for part in blocks_of(len(order_k), 32):
            tokens = [order_k[t] for t in part if keep[b, order_k[t]]]
            lives.append(bool(tokens))
            part_means.append(keys[b, h // shared, tokens].mean(0) if tokens else None)
        for a_row in range(rows):
            total = torch.zeros(len(blocks)).double()
            for part in blocks_of(len(order_q), 8)[a * a_row : a * a_row + a]:
                q_mean = q[b, h].double()[[order_q[t] for t in part]].mean(0)
                row = logits[b, h, part.start // 8]
                of_fours = []
                for first in range(0, len(part_means), 4):
                    there = [mean for mean in part_means[first : first + 4] if mean is not None]
                    if there:
                        logit = scale * (q_mean * torch.stack(there).mean(0)).sum() + math.log(len(there))
                        of_fours.append(logit)
                if not of_fours:
                    continue
                norm = torch.stack(of_fours).logsumexp(0)
                if not compensate or row.max() - norm >= 60 * math.log(2):
                    norm = row.logsumexp(0)
                shares = (row - norm).exp()
                total += torch.stack([shares[n * j : n * j + n].sum() ** 2 for j in range(len(blocks))])
            for j, block in enumerate(blocks):
                tokens = [order_k[t] for t in block if keep[b, order_k[t]]]
                if tokens:
                    far = spread(keys[b, h // shared, tokens])
                    scores[b, h, a_row, j] = total[j].sqrt() * (far**2 if compensate else far)
    return scores


SCORES = {"mean": mean_scores, "submeans": part_mass, "spread": mean_errors}


def free_budget(rows, columns, sparsity):
    """Free columns to keep in a row, so that about 1 - sparsity of all blocks are kept; bools: protected or not."""
    free = sum(not row for row in rows)
    wanted = budget(len(rows) * len(columns), sparsity)
    given = sum(len(columns) if row else sum(columns) for row in rows)
    return max(1, math.ceil((wanted - given) / free)) if free else 1


def rf_v2_rows(scores, sparsity, protected_q, protected_k, exact=False):
    """One row at a time: a sort in plain Python. sparsity: one, or one for each head."""
    dense = torch.zeros(scores.shape, dtype=torch.bool)
    n = scores.shape[-1]
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in scores.shape[:3])).tolist():
        row = scores[b, h, i].tolist()
        ranked = sorted(range(n), key=lambda j: (not math.isnan(row[j]), -row[j] if not math.isnan(row[j]) else 0, j))
        share = sparsity[h] if isinstance(sparsity, list) else sparsity
        number = max(1, budget(n, share))
        if exact:
            ranked = [j for j in ranked if not protected_k[j]]
            number = free_budget(list(protected_q), list(protected_k), share)
        for j in ranked[:number]:
            dense[b, h, i, j] = True
        if protected_q[i]:
            dense[b, h, i] = True
        for j in range(n):
            if protected_k[j]:
                dense[b, h, i, j] = True
    return dense


def ada_bsa_mass(q, k, scale, keep, causal):
    """float64 [B, Hq, NQ, NK], group by group."""
    q, k = q.float().double(), k.float().double()
    batch, heads, q_len, dim = q.shape
    k_len = k.shape[2]
    shared = heads // k.shape[1]
    gq, gk = math.ceil(q_len / 8), math.ceil(k_len / 8)
    mass = torch.zeros(batch, heads, math.ceil(q_len / 128), math.ceil(k_len / 128)).double()
    for b in range(batch):
        for h in range(heads):
            qs = torch.zeros(gq * 8, dim).double()
            qs[:q_len] = q[b, h]
            ks = torch.zeros(gk * 8, dim).double()
            ks[:k_len] = torch.where(keep[b][:, None], k[b, h // shared], 0.0)
            for a in range(gq):
                row = torch.full((gk,), -math.inf).double()
                for c in range(gk):
                    real = any(keep[b, t] for t in range(8 * c, min(8 * c + 8, k_len)))
                    if real and not (causal and c > a):
                        pairs = (qs[8 * a : 8 * a + 8].flip(0) * ks[8 * c : 8 * c + 8]).sum()
                        row[c] = pairs * scale / 8
                if not torch.isinf(row).all():
                    for c, p in enumerate(row.softmax(0).tolist()):
                        mass[b, h, a // 16, c // 16] += p
    return mass


def ada_bsa_rows(mass, sparsity, cdf, sink, recent, causal, keep, slack=0.0):
    """`slack` moves the threshold a little, to tell a near-tie from a difference."""
    dense = torch.zeros(mass.shape, dtype=torch.bool)
    columns = mass.shape[3]
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in mass.shape[:3])).tolist():
        visible = list(range(i + 1)) if causal else list(range(columns))
        forced = ({0} if sink else set()) | (({i} if causal else {columns - 1}) if recent else set())
        others = [j for j in visible if j not in forced]

        def score(j, b=b, h=h, i=i):
            alive = keep[b, 128 * j : 128 * j + 128].any()
            return mass[b, h, i, j].item() if alive else -math.inf

        others.sort(key=lambda j: (-score(j), j))
        total = sum(mass[b, h, i, j].item() for j in others)
        count, reached = 0, 0.0
        while count < len(others) and (cdf == 1.0 or reached < (cdf + slack) * total):
            reached += mass[b, h, i, others[count]].item()
            count += 1
        count = min(max(1, min(count, budget(len(visible), sparsity))), len(others))
        for j in [*forced, *others[:count]]:
            dense[b, h, i, j] = True
    return dense


# --- attention -------------------------------------------------------------------------------------------------------


def attention(q, k, v, tokens, attn_mask=None, scale=None, causal=False):
    """float64 out and lse with `tokens`, bool [B, Hq, Sq, Sk] in the caller's order: True where a pair takes part."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keep, bias = kept_keys(attn_mask, k.shape[0], k.shape[2])
    shared = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(shared, 1), v.double().repeat_interleave(shared, 1)
    tokens = tokens & keep[:, None, None, :]
    if causal:
        tokens = tokens & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    logits = (q @ k.mT * scale + bias[:, None, None, :]).masked_fill(~tokens, -math.inf)
    probs = logits.softmax(-1).masked_fill(~tokens, 0.0)
    return probs @ v.masked_fill(~keep[:, None, :, None], 0.0), logits.logsumexp(-1)


def compensated(q, k, v, dense, order_q, order_k, block_size, attn_mask=None, scale=None, spreads=False):
    """out, lse in float64: the kept tokens, and one token for each skipped block: its means, its number as a bias.

    spreads: with predictor="spread", that number is larger, the farther keys are from their mean.
    """
    keep, bias = kept_keys(attn_mask, q.shape[0], k.shape[2])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf).double()
    q_size, k_size = sides(block_size)
    blocks = blocks_of(len(order_k), k_size)
    for b in range(q.shape[0]):
        live = [[order_k[i] for i in block if keep[b, order_k[i]]] for block in blocks]
        for h in range(q.shape[1]):
            for row, rows in enumerate(blocks_of(len(order_q), q_size)):
                tokens = [t for j, block in enumerate(live) if dense[b, h, row, j] for t in block]
                skipped = [block for j, block in enumerate(live) if block and not dense[b, h, row, j]]
                if not tokens and not skipped:
                    continue
                keys = torch.cat([k[b, h, tokens], *(k[b, h, block].mean(0, keepdim=True) for block in skipped)])
                values = torch.cat([v[b, h, tokens], *(v[b, h, block].mean(0, keepdim=True) for block in skipped)])
                extra = torch.cat([bias[b, tokens], *(bias[b, block].logsumexp(0, keepdim=True) for block in skipped)])
                queries = [order_q[i] for i in rows]
                if spreads:
                    power = q[b, h, queries[::8]].square().mean()
                    for place, block in enumerate(skipped, len(tokens)):
                        extra[place] += (1 + scale**2 / 4 * power * spread(k[b, h, block])).log()
                logits = q[b, h, queries] @ keys.T * scale + extra
                lse[b, h, queries] = logits.logsumexp(-1)
                out[b, h, queries] = logits.softmax(-1) @ values
    return out, lse


def expand(dense, order_q, order_k, block_size):
    """A block mask [B, H, NQ, NK] in block order -> bool [B, H, Sq, Sk] in the caller's order."""
    tokens = torch.empty(*dense.shape[:2], len(order_q), len(order_k), dtype=torch.bool)
    q_block = torch.empty(len(order_q), dtype=torch.long)
    k_block = torch.empty(len(order_k), dtype=torch.long)
    for position, token in enumerate(order_q):
        q_block[token] = position // sides(block_size)[0]
    for position, token in enumerate(order_k):
        k_block[token] = position // sides(block_size)[1]
    tokens.copy_(dense[:, :, q_block][..., k_block])
    return tokens
