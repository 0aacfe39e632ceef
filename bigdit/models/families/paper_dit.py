"""DiT as it was published: one timestep and one label embedder for all blocks, and fixed sin-cos positions.

diffusers' DiT has an embedder in every block, which makes it larger. The paper's weights have this layout.

Source: Peebles & Xie, arXiv:2212.09748; names of parameters and initial values as in the code of the paper.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from bigdit.models.family import Conditions, Extra, Family

FREQUENCIES = 256
MAX_PERIOD = 10000.0


class PaperDiT(ModelMixin, ConfigMixin):
    """A class-conditional DiT for latents [B, in_channels, sample_size, sample_size].

    `learn_sigma`: the output has 2 × in_channels channels, of which the first half is the prediction.
    `null_class`: the label embedder has one class more, `num_classes`, for "no class".
    """

    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        null_class: bool = True,
        learn_sigma: bool = True,
    ) -> None:
        super().__init__()
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.x_embedder = PatchEmbedder(in_channels, hidden_size, patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes + null_class, hidden_size)
        # A parameter without gradient in the code of the paper; as a buffer it has the same name in the state
        # dict, and engines that shard parameters leave it alone.
        self.register_buffer("pos_embed", sin_cos_positions(hidden_size, sample_size // patch_size))
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * self.out_channels)
        self._initialise()

    def forward(self, latents: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, out_channels, H, W] for latents [B, in_channels, H, W], t [B] in 0 … 1000, labels [B] int64."""
        x = self.x_embedder(latents) + self.pos_embed
        condition = self.t_embedder(t) + self.y_embedder(labels)
        for block in self.blocks:
            x = block(x, condition)
        return self._unpatchify(self.final_layer(x, condition))

    def _unpatchify(self, tokens: torch.Tensor) -> torch.Tensor:
        side, patch = math.isqrt(tokens.shape[1]), self.config.patch_size
        tiles = tokens.reshape(tokens.shape[0], side, side, patch, patch, self.out_channels)
        return tiles.permute(0, 5, 1, 3, 2, 4).reshape(tokens.shape[0], self.out_channels, side * patch, side * patch)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.view(self.config.hidden_size, -1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        for weight in (self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(weight.weight, std=0.02)
        # adaLN-Zero: every block begins as the identity, and the output as zero.
        for zero in (*(b.adaLN_modulation[1] for b in self.blocks), self.final_layer.adaLN_modulation[1]):
            nn.init.zeros_(zero.weight)
        nn.init.zeros_(self.final_layer.linear.weight)


class PatchEmbedder(nn.Module):
    """Patches of latents as tokens [B, N, D]."""

    def __init__(self, in_channels: int, hidden_size: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden_size, patch_size, patch_size)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.proj(latents).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Sinusoids of t, in fp32, through two linear layers: [B, D]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = FREQUENCIES // 2
        exponents = torch.arange(half, dtype=torch.float32, device=t.device) / half
        angles = t[:, None].float() * torch.exp(-math.log(MAX_PERIOD) * exponents)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.mlp[0].weight.dtype))


class LabelEmbedder(nn.Module):
    """A row of the table for each class: [B, D]."""

    def __init__(self, classes: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes, hidden_size)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.embedding_table(labels)


class DiTBlock(nn.Module):
    """Self-attention and a feed-forward, each shifted, scaled and gated by the condition."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = FeedForward(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        modulation = self.adaLN_modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Attention(nn.Module):
    """Multi-head self-attention, its three projections in one."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        heads = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.proj(attended.transpose(1, 2).reshape(batch, tokens, dim))


class FeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between."""

    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, inner)
        self.fc2 = nn.Linear(inner, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class FinalLayer(nn.Module):
    """Tokens to patches of latents, shifted and scaled by the condition."""

    def __init__(self, hidden_size: int, out_features: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


def sin_cos_positions(hidden_size: int, side: int) -> torch.Tensor:
    """Fixed positions [1, side², hidden_size] fp32: half of the channels for the column, half for the row."""
    quarter = hidden_size // 4
    frequencies = MAX_PERIOD ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.outer(torch.arange(side, dtype=torch.float64), frequencies)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns, rows = table.repeat(side, 1), table.repeat_interleave(side, dim=0)
    return torch.cat([columns, rows], dim=1).float().unsqueeze(0)


# The published models see 1000 training timesteps.
TIMESTEP_SCALE = 1000.0


def predict(model: nn.Module, latents: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
    """Output [B, C, S, S] for latents of the model's own size, t [B] and the extra class_label [B]; 2 C channels of a
    model with learned sigma.

    A label dropped for classifier-free guidance comes as the class after the last.
    """
    return model(latents, t * TIMESTEP_SCALE, conditions.extras["class_label"])


def extras(model: nn.Module) -> dict[str, Extra]:
    """The class, 0 … num_classes - 1, and num_classes for none."""
    return {"class_label": Extra(shape=(), dtype=torch.int64)}


FAMILY = Family("PaperDiT", predict, lists=("blocks",), extras=extras)
