"""Encoders of images, sounds and texts that meet in one space, and a language model that describes what they encode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FFT = 128  # samples in a spectrum
HEADS = 4  # of each layer


class ImageEncoder(nn.Sequential):
    def __init__(self, width: int) -> None:
        layers = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(4, outputs), nn.GELU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64 * 4, width))


class AudioEncoder(nn.Module):
    """Reads the logarithm of a spectrogram, which is made on the device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)
        self.layers = nn.Sequential(
            nn.Conv1d(FFT // 2 + 1, 64, 3, padding=1), nn.GELU(), nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.GELU()
        )
        self.output = nn.Linear(64 * 4, width)

    def forward(self, audio: Tensor) -> Tensor:
        spectrum = torch.stft(audio, FFT, FFT // 2, window=self.window, return_complex=True).abs().square()
        features = self.layers((1 + spectrum).log())
        return self.output(functional.adaptive_avg_pool1d(features, 4).flatten(1))


class TextEncoder(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) / width**0.5)
        self.layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.output = nn.Linear(width, width)

    def forward(self, texts: Tensor) -> Tensor:
        return self.output(self.layer(self.words(texts) + self.places).mean(1))


class LanguageModel(nn.Module):
    """Predicts each word of a caption from those before it and from a prefix: what was seen and what was heard."""

    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length + 1, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length + 1), persistent=False)

    def forward(self, prefix: Tensor, texts: Tensor) -> Tensor:
        """Return logits (batch, length + 1, words) of the words of texts (batch, length), and of one behind them."""
        inputs = torch.cat([prefix, self.words(texts)], 1)
        count = inputs.shape[1]
        hidden = self.layers(inputs + self.places[:count], self.mask[:count, :count])
        return self.output(hidden[:, 1:])

    @torch.no_grad()
    def describe(self, prefix: Tensor, length: int) -> Tensor:
        """Return the likeliest words (batch, length), one after the other."""
        texts = prefix.new_zeros(len(prefix), 0, dtype=torch.int64)
        for _ in range(length):
            texts = torch.cat([texts, self(prefix, texts)[:, -1:].argmax(2)], 1)
        return texts


def contrast(left: Tensor, right: Tensor, alike: Tensor, scale: Tensor) -> Tensor:
    """Return the contrastive loss of two embeddings of each scene, over all scenes of a batch.

    Scenes with the same caption count as equally right (``alike``, the share of each). Source: Radford et al. 2021,
    "Learning Transferable Visual Models From Natural Language Supervision", figure 3.
    """
    logits = scale.exp() * functional.normalize(left, dim=1) @ functional.normalize(right, dim=1).T
    return (functional.cross_entropy(logits, alike) + functional.cross_entropy(logits.T, alike)) / 2
