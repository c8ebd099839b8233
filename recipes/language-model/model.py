"""A GPT whose parameters have the names, shapes and places of GPT-2's, so that others load them as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    positions: int
    layers: int
    heads: int
    width: int

    def gpt2_config(self, separator: int) -> dict[str, Any]:
        """Return what transformers needs to know of the weights: its ``config.json``."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.positions,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_embd": self.width,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": separator,
            "eos_token_id": separator,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }


class Projection(nn.Module):
    """A linear layer whose weight has the shape (inputs, outputs), as in GPT-2; torch's has it transposed."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.T, self.bias)


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, into_sum = shape.width, 0.02 / math.sqrt(2 * shape.layers)  # GPT-2's scale for what is added up.
        self.heads = shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": Projection(width, 3 * width), "c_proj": Projection(width, width, into_sum)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": Projection(width, 4 * width), "c_proj": Projection(4 * width, width, into_sum)}
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        heads = self.attn["c_attn"](self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        x = x + self.attn["c_proj"](seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next token of each token.

    Args:
        shape: its size.
        separator: the token that begins a document. Tokens see those of their own document alone, whose positions
            begin at 0. None for documents that see all before them, with torch's fastest kernel, as GPT-3 was trained.
    """

    def __init__(self, shape: Shape, separator: int | None) -> None:
        super().__init__()
        self.shape, self.separator = shape, separator
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for tokens (batch, length)."""
        length = tokens.shape[1]
        places, mask = torch.arange(length, device=tokens.device), None
        if self.separator is not None:
            begins = tokens == self.separator
            documents = begins.cumsum(1)
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
            mask = ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]
            places = places - torch.where(begins, places, 0).cummax(1).values
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x, mask)
        return functional.linear(self.ln_f(x), self.wte.weight)

    def flops_per_token(self) -> int:
        """Count the operations of forward and backward pass: 6 N + 12 L H Q T, of PaLM (arXiv:2204.02311), appendix B.

        N are the parameters that are multiplied with each token: all but the positions', which are looked up. H Q is
        the width, T the length of a sequence, all of which counts as seen. What is computed again does not count.
        """
        multiplied = sum(parameter.numel() for parameter in self.parameters()) - self.wpe.weight.numel()
        return 6 * multiplied + 12 * self.shape.layers * self.shape.width * self.shape.positions
