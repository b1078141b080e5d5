"""Reference forward pass of every published drafter, from its formulas and its tensor names: whole sequences, float64.

This file shares no code with the library, so that one mistake cannot hide in both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def to_double(tensors: Weights) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def medusa(w: Weights, head: int, layers: int, h: Tensor, lm_head: Tensor | None = None) -> Tensor:
    """Logits [.., V] of x_{t+2+head} from the state h_t [.., H]."""
    x = h
    for layer in range(layers):
        x = x + silu(x @ w[f"{head}.{layer}.linear.weight"].T + w[f"{head}.{layer}.linear.bias"])
    return x @ (w[f"{head}.{layers}.weight"] if lm_head is None else lm_head).T


def speculator(w: Weights, n: int, is_tied: bool, is_scaled: bool, h: Tensor, tokens: Sequence[int]) -> list[Tensor]:
    """Logits [V] of x_{t+2}, x_{t+3}, ... from h_t [H] and the tokens x_{t+1}, x_{t+2}, ..."""
    inner = w["speculator.proj.0.weight"].shape[0]
    state_weight = 0.5 ** (0.5 / n)
    token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    one = torch.ones(())
    s = rms(h, one, 1e-6) / math.sqrt(2) if is_scaled else h
    out = []
    for i, token in enumerate(tokens):
        j, k = (0, min(i, 1)) if is_tied else (i, i)
        z = w[f"speculator.emb.{j}.weight"][token]
        s = w[f"speculator.proj.{k}.weight"] @ s + token_weight / state_weight * z
        s = rms(s, w[f"speculator.ln.{j}.weight"], 1e-6) + w[f"speculator.ln.{j}.bias"]
        s = s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))
        out.append(w[f"speculator.head.{j}.weight"] @ s)
    return out


def blockwise(w: Weights, head: int, h: Tensor, lm_head: Tensor) -> Tensor:
    """Logits [.., V] of x_{t+2+head} from the state h_t [.., H]."""
    x = (h @ w["blockwise.hidden.weight"].T + w["blockwise.hidden.bias"]).clamp_min(0)
    every = x @ w["blockwise.output.weight"].T + w["blockwise.output.bias"]
    return (h + every[..., head * h.shape[-1] : (head + 1) * h.shape[-1]]) @ lm_head.T


def hydra(
    w: Weights, head: int, layers: int, h: Tensor, read: Sequence[Tensor], lm_head: Tensor | None = None
) -> Tensor:
    """Logits [.., V] of x_{t+2+head} from h_t and the embeddings of x_{t+1}, ..., x_{t+1+head}, [.., H] each."""
    x = torch.cat([h, *read[: head + 1]], -1)
    if f"hydra_reduce.{head}.weight" in w:
        x = x @ w[f"hydra_reduce.{head}.weight"].T
    name = f"hydra_mlp.{head}"
    kept = x @ w[f"{name}.0.res_connection.weight"].T + w[f"{name}.0.res_connection.bias"]
    for layer in range(layers):
        kept = kept + silu(x @ w[f"{name}.{layer}.linear.weight"].T + w[f"{name}.{layer}.linear.bias"])
        x = kept
    if lm_head is not None:
        return x @ lm_head.T
    return x @ w[f"hydra_lm_head.{head}.weight"].T + w[f"hydra_lm_head.{head}.bias"]


@dataclass(frozen=True)
class LayerNumbers:
    """Numbers of a decoder layer, as config.json gives them."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    eps: float = 1e-5
    theta: float = 500.0
    factor: float = 1.0  # of linear rope scaling
    window: int | None = None  # positions that a row attends to, itself included


def rotate(x: Tensor, numbers: LayerNumbers) -> Tensor:
    """[L, heads, D] by position: pairs (i, i + D/2) turn by position / theta^(2i/D)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position / numbers.factor / numbers.theta ** (2 * i / (2 * half))
            a, b = x[position, :, i], x[position, :, i + half]
            out[position, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[position, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(w: Weights, prefix: str, x: Tensor, n: LayerNumbers) -> Tensor:
    """[L, width] -> [L, H], every row sees itself and those before it."""

    def project(name: str, heads: int) -> Tensor:
        y = x @ w[f"{prefix}.{name}_proj.weight"].T
        if f"{prefix}.{name}_proj.bias" in w:
            y = y + w[f"{prefix}.{name}_proj.bias"]
        y = y.view(len(x), heads, n.head_dim)
        norm = w.get(f"{prefix}.{name}_norm.weight")
        return y if norm is None else rms(y, norm, n.eps)

    q, k, v = rotate(project("q", n.heads), n), rotate(project("k", n.kv_heads), n), project("v", n.kv_heads)
    mixed = torch.zeros(len(x), n.heads, n.head_dim, dtype=x.dtype)
    for head in range(n.heads):
        kv = head // (n.heads // n.kv_heads)
        for row in range(len(x)):
            first = 0 if n.window is None else max(0, row + 1 - n.window)
            scores = k[first : row + 1, kv] @ q[row, head] / math.sqrt(n.head_dim)
            share = torch.exp(scores - scores.max())
            mixed[row, head] = (share / share.sum()) @ v[first : row + 1, kv]
    return mixed.flatten(1) @ w[f"{prefix}.o_proj.weight"].T


def mlp(w: Weights, prefix: str, x: Tensor) -> Tensor:
    gated = silu(x @ w[f"{prefix}.gate_proj.weight"].T) * (x @ w[f"{prefix}.up_proj.weight"].T)
    return gated @ w[f"{prefix}.down_proj.weight"].T


def eagle_layers(
    w: Weights, layers: int, tokens: Sequence[int], features: Tensor, rows: Tensor, n: LayerNumbers
) -> Tensor:
    """[L, H]: the state that stands for h_{t+1}, from x_{t+1} and feature t at every t. `rows` embed tokens."""
    f = torch.cat([rows[list(tokens)], features], -1) @ w["fc.weight"].T
    if "fc.bias" in w:
        f = f + w["fc.bias"]
    for i in range(layers):
        read = f if i == 0 else rms(f, w[f"layers.{i}.input_layernorm.weight"], n.eps)
        f = f + attention(w, f"layers.{i}.self_attn", read, n)
        f = f + mlp(w, f"layers.{i}.mlp", rms(f, w[f"layers.{i}.post_attention_layernorm.weight"], n.eps))
    return f


def eagle(
    w: Weights, layers: int, tokens: Sequence[int], h: Tensor, rows: Tensor, lm_head: Tensor, n: LayerNumbers
) -> tuple[Tensor, Tensor]:
    """Logits and features of as many rows as there are tokens: the first len(h) read true states, the others the output
    before them. Everything is computed again for every row."""
    features = h
    while True:
        out = eagle_layers(w, layers, tokens[: len(features)], features, rows, n)
        if len(features) == len(tokens):
            return out @ lm_head.T, out
        features = torch.cat([features, out[-1:]])


@dataclass(frozen=True)
class DFlashFlags:
    """Numbers of a DFlash config, apart from its layer."""

    layers: int = 2
    size: int = 4
    mask: int = 39
    causal: tuple[bool, ...] = (False, False)
    windows: tuple[int | None, ...] = (None, None)


def dflash(
    w: Weights, root: int, states: Tensor, rows: Tensor, lm_head: Tensor, n: LayerNumbers, flags: DFlashFlags
) -> Tensor:
    """Logits [S, V] of a block of x_L and masks, from the target's states [L, F] of the L tokens before it."""
    return dflash_states(w, root, states, rows, n, flags) @ lm_head.T


def dflash_states(w: Weights, root: int, states: Tensor, rows: Tensor, n: LayerNumbers, flags: DFlashFlags) -> Tensor:
    """States [S, H] of that block after the last norm."""
    length, size = len(states), flags.size
    c = rms(states @ w["fc.weight"].T, w["hidden_norm.weight"], n.eps)
    x = rows[[root] + [flags.mask] * (size - 1)]
    for i in range(flags.layers):
        name, causal, window = f"layers.{i}.self_attn", flags.causal[i], flags.windows[i]
        read = rms(x, w[f"layers.{i}.input_layernorm.weight"], n.eps)
        every = torch.cat([c, read])
        q = rms((every @ w[f"{name}.q_proj.weight"].T).view(len(every), n.heads, -1), w[f"{name}.q_norm.weight"], n.eps)
        k = rms(
            (every @ w[f"{name}.k_proj.weight"].T).view(len(every), n.kv_heads, -1), w[f"{name}.k_norm.weight"], n.eps
        )
        q, k, v = rotate(q, n), rotate(k, n), (every @ w[f"{name}.v_proj.weight"].T).view(len(every), n.kv_heads, -1)
        mixed = torch.zeros(size, n.heads, n.head_dim, dtype=x.dtype)
        for head in range(n.heads):
            kv = head // (n.heads // n.kv_heads)
            for row in range(size):
                place = length + row
                first, last = 0 if window is None else max(0, place + 1 - window), place + 1 if causal else len(every)
                share = torch.exp(k[first:last, kv] @ q[place, head] / math.sqrt(n.head_dim))
                mixed[row, head] = (share / share.sum()) @ v[first:last, kv]
        x = x + mixed.flatten(1) @ w[f"{name}.o_proj.weight"].T
        x = x + mlp(w, f"layers.{i}.mlp", rms(x, w[f"layers.{i}.post_attention_layernorm.weight"], n.eps))
    return rms(x, w["norm.weight"], n.eps)


def dspark_chain(w: Weights, kind: str, root: int, states: Tensor, lm_head: Tensor) -> tuple[list[int], list[float]]:
    """Likeliest tokens of rows with states [D, H], each after the one before, and the predicted acceptance of each."""
    token, tokens, chances = root, [], []
    memory = torch.zeros(w["markov_head.markov_w1.weight"].shape[1], dtype=states.dtype)
    for h in states:
        e = w["markov_head.markov_w1.weight"][token]
        u = e
        if kind == "gated":
            u = e * torch.sigmoid(
                w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
            )
        elif kind == "rnn":
            z = w["markov_head.joint_proj.weight"] @ torch.cat([memory, e, h]) + w["markov_head.joint_proj.bias"]
            g, c, o = z.chunk(3)
            memory = torch.sigmoid(g) * memory + (1 - torch.sigmoid(g)) * torch.tanh(c)
            u = torch.tanh(o)
        odds = w["confidence_head.proj.weight"] @ torch.cat([h, e]) + w["confidence_head.proj.bias"]
        chances.append(float(torch.sigmoid(odds)))
        token = int((lm_head @ h + w["markov_head.markov_w2.weight"] @ u).argmax())
        tokens.append(token)
    return tokens, chances


def hydra_prefix(w: Weights, h: Tensor, n: LayerNumbers) -> Tensor:
    """[L, H] what Hydra++'s heads read at every position, from the target's states h [L, H]."""
    layer = "prefix_embeding_layer.layers.0"
    x = h + attention(w, f"{layer}.self_attn", rms(h, w[f"{layer}.input_layernorm.weight"], n.eps), n)
    x = x + mlp(w, f"{layer}.mlp", rms(x, w[f"{layer}.post_attention_layernorm.weight"], n.eps))
    return rms(x, w["prefix_embeding_layer.norm.weight"], n.eps)


@dataclass(frozen=True)
class Eagle3Flags:
    """Flags of an EAGLE-3 config, apart from its layer."""

    first: str = "midlayer"
    layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False
    windows: tuple[int | None, ...] = (None, None)


def project_features(w: Weights, states: Sequence[Tensor], n: LayerNumbers) -> Tensor:
    """Compute [L, H], the input of the layer, from the target's states [L, H_t] at its boundaries."""
    names = [[f"fc_norm.{i}.weight", f"aux_norm_{place}.weight"] for i, place in enumerate(("low", "mid", "high"))]
    parts = list(states)
    for i, aliases in enumerate(names):
        for name in aliases:
            if name in w:
                parts[i] = rms(parts[i], w[name], n.eps)
    x = torch.cat(parts, -1)
    if "input_norm.weight" in w:
        x = rms(x, w["input_norm.weight"], n.eps)
    return x @ w["fc.weight"].T if "fc.weight" in w else x


def eagle3_layers(
    w: Weights, tokens: Sequence[int], g: Tensor, rows: Tensor, n: LayerNumbers, flags: Eagle3Flags
) -> Tensor:
    first, by_layer = flags.first, [replace(n, window=window) for window in flags.windows]
    normed = rms(g, w[f"{first}.hidden_norm.weight"], n.eps)
    embedded = rms(rows[list(tokens)], w[f"{first}.input_layernorm.weight"], n.eps)
    residual = normed if flags.norm_before_residual else g
    h = residual + attention(w, f"{first}.self_attn", torch.cat([embedded, normed], -1), by_layer[0])
    h = h + mlp(w, f"{first}.mlp", rms(h, w[f"{first}.post_attention_layernorm.weight"], n.eps))
    for i in range(1, flags.layers):
        read = rms(h, w[f"layers.{i}.input_layernorm.weight"], n.eps)
        h = h + attention(w, f"layers.{i}.self_attn", read, by_layer[i])
        h = h + mlp(w, f"layers.{i}.mlp", rms(h, w[f"layers.{i}.post_attention_layernorm.weight"], n.eps))
    return h


def eagle3(
    w: Weights,
    tokens: Sequence[int],
    states: Sequence[Tensor],
    rows: Tensor,
    lm_head: Tensor,
    n: LayerNumbers,
    flags: Eagle3Flags,
) -> tuple[Tensor, Tensor]:
    """Compute as `eagle`, from the target's states [L, H_t] at every boundary; logits are over the drafted tokens."""
    features = project_features(w, states, n)
    while True:
        h = eagle3_layers(w, tokens[: len(features)], features, rows, n, flags)
        normed = rms(h, w["norm.weight"], n.eps)
        following = normed if flags.norm_output else h
        if len(features) == len(tokens):
            return normed @ lm_head.T, following
        features = torch.cat([features, following[-1:]])


@dataclass(frozen=True)
class AssistantFlags:
    """Numbers of a Gemma-4 assistant's config."""

    heads: int
    kinds: tuple[str, ...]
    window: int  # of layers of kind sliding_attention
    theta: Mapping[str, float]
    rotated: Mapping[str, float]  # share of a head that turns
    clusters: int = 0  # 0 = all tokens have logits
    selected: int = 0
    eps: float = 1e-6


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turn_at(x: Tensor, position: int, theta: float, rotated: float) -> Tensor:
    """[heads, D] at one position: the first of the pairs (i, i + D/2) turn by position / theta^(2i/D)."""
    half, out = x.shape[-1] // 2, x.clone()
    for i in range(int(rotated * x.shape[-1] // 2)):
        angle = position / theta ** (2 * i / (2 * half))
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * math.cos(angle) - b * math.sin(angle)
        out[:, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def assistant(
    w: Weights, embedding: Tensor, state: Tensor, kv: Mapping[str, tuple[Tensor, Tensor]], flags: AssistantFlags
) -> tuple[Tensor, Tensor]:
    """Logits [V] after a token, and the next state, from its scaled embedding [B] and the state [B] before it.

    `kv` has the target's rotated keys and its values [L, Hkv, D] by kind of layer, of the L tokens before the root. The
    root is at position L.
    """
    x = w["pre_projection.weight"] @ torch.cat([embedding, state])
    for i, kind in enumerate(flags.kinds):
        keys, values = kv[kind]
        name, length = f"model.layers.{i}", len(keys)
        read = rms(x, w[f"{name}.input_layernorm.weight"], flags.eps)
        q = rms(
            (w[f"{name}.self_attn.q_proj.weight"] @ read).view(flags.heads, -1),
            w[f"{name}.self_attn.q_norm.weight"],
            flags.eps,
        )
        q = turn_at(q, length, flags.theta[kind], flags.rotated[kind])
        first = max(0, length - 1 - flags.window) if kind == "sliding_attention" else 0
        mixed = []
        for head in range(flags.heads):
            of = head // (flags.heads // keys.shape[1])
            share = torch.softmax(keys[first:, of] @ q[head], 0)
            mixed.append(share @ values[first:, of])
        y = w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = x + rms(y, w[f"{name}.post_attention_layernorm.weight"], flags.eps)
        read = rms(x, w[f"{name}.pre_feedforward_layernorm.weight"], flags.eps)
        y = gelu(w[f"{name}.mlp.gate_proj.weight"] @ read) * (w[f"{name}.mlp.up_proj.weight"] @ read)
        y = w[f"{name}.mlp.down_proj.weight"] @ y
        x = (x + rms(y, w[f"{name}.post_feedforward_layernorm.weight"], flags.eps)) * w[f"{name}.layer_scalar"]
    h = rms(x, w["model.norm.weight"], flags.eps)
    logits, rows = w["model.embed_tokens.weight"] @ h, w.get("masked_embedding.token_ordering")
    if rows is not None:
        allowed = rows.view(flags.clusters, -1)[
            (w["masked_embedding.centroids.weight"] @ h).topk(flags.selected).indices
        ]
        masked = torch.full_like(logits, -math.inf)
        masked[allowed.flatten()] = logits[allowed.flatten()]
        logits = masked
    return logits, w["post_projection.weight"] @ h
