"""The target: a small byte-level language model with the structure and tensor names of llama."""
import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}


def rope_table(positions, dim, theta):
    """cos and sin [n, dim/2]; pairs are (i, i + dim/2), as in llama."""
    f = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = positions.to(torch.float64)[:, None] * f[None, :]
    return angle.cos().float(), angle.sin().float()


def rotate(x, table):
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden_size"]
        self.heads, self.width = c["num_attention_heads"], c["head_dim"]
        self.q_proj = nn.Linear(h, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(h, self.heads * self.width, bias=False)
        self.v_proj = nn.Linear(h, self.heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, h, bias=False)

    def forward(self, x, table, cache, at):
        b, n, _ = x.shape
        w = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        q, k, v = F.linear(x, w).view(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, table), rotate(k, table)
        if cache is not None:
            cache[0][:, :, at:at + n] = k
            cache[1][:, :, at:at + n] = v
            k, v = cache[0][:, :, :at + n], cache[1][:, :, :at + n]
        mask = None
        if 1 < n < k.shape[2]:  # several rows behind a cache
            mask = torch.ones(n, k.shape[2], dtype=torch.bool).tril(k.shape[2] - n)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                           is_causal=n > 1 and mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, -1))


class Mlp(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm = Norm(h, eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(h, eps)
        self.mlp = Mlp(h, c["intermediate_size"])

    def forward(self, x, table, cache, at):
        x = x + self.self_attn(self.input_layernorm(x), table, cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])


class Target(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.config = dict(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def reset(self, gen):
        """Fresh weights; the last linear of each branch is smaller, so that depth does not blow up
        the residual stream."""
        depth = (2 * self.config["num_hidden_layers"]) ** -0.5
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name or "head" in name else p.shape[1] ** -0.5 * 0.5
                nn.init.normal_(p, 0.0, std * (depth if last else 1.0), generator=gen)

    def forward(self, ids, taps=(), cache=None, at=0):
        """Final normed states [b, n, h] and the residual stream after each layer in taps."""
        c = self.config
        table = rope_table(torch.arange(at, at + ids.shape[1]), c["head_dim"], c["rope_theta"])
        x = self.model.embed_tokens(ids)
        tapped = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, table, None if cache is None else cache[i], at)
            if i in taps:
                tapped.append(x)
        return self.model.norm(x), tapped

    def new_cache(self, batch, length):
        c = self.config
        shape = (batch, c["num_attention_heads"], length, c["head_dim"])
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.model.layers]

    @torch.no_grad()
    def generate(self, prompts, count, temperature=None, gen=None):
        """prompts [b, n] and count bytes behind each. temperature(position) gives [b], where 0 is
        greedy; without it all is greedy."""
        ids = torch.cat([prompts, prompts.new_zeros(prompts.shape[0], count)], dim=1)
        cache = self.new_cache(*ids.shape)
        at, n = 0, prompts.shape[1]
        while n < ids.shape[1]:
            states, _ = self.forward(ids[:, at:n], cache=cache, at=at)
            logits = self.lm_head(states[:, -1])
            token = logits.argmax(-1)
            if temperature is not None:
                t = temperature(n)
                p = (logits / t.clamp_min(1e-6)[:, None]).softmax(-1)
                drawn = torch.multinomial(p, 1, generator=gen)[:, 0]
                token = torch.where(t > 0, drawn, token)
            ids[:, n] = token
            at, n = n, n + 1
        return ids
