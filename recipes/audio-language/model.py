"""Log-mel spectrograms, an encoder, and a causal decoder that reads what is heard as a prefix of the text."""

from __future__ import annotations

import math

import torch
from data import END, RATE
from torch import Tensor, nn
from torch.nn import functional

FFT, HOP, MELS = 256, 80, 32
HEADS = 4  # of each layer


class LogMel(nn.Module):
    """Turns recordings (count, samples) to the logarithm of mel bands (count, frames, bands), on their device.

    Triangular filters, evenly spaced on the mel scale ``2595 log10(1 + hertz / 700)``: O'Shaughnessy 1987, "Speech
    Communication", and HTK.
    """

    def __init__(self) -> None:
        super().__init__()
        edges = 700 * (10 ** (torch.linspace(0, mel(RATE / 2), MELS + 2) / 2595) - 1)
        hertz = torch.linspace(0, RATE / 2, FFT // 2 + 1)[:, None]
        rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
        falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
        self.register_buffer("filters", torch.minimum(rising, falling).clamp(min=0), persistent=False)
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        # Silence behind it, so that its last frames are the same however long others of the batch are.
        audio = functional.pad(audio, (0, FFT + 4 * HOP))
        spectrum = torch.stft(audio, FFT, HOP, window=self.window, return_complex=True).abs().square()
        return (spectrum.transpose(1, 2) @ self.filters + 1e-3).log()


def mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def positions(count: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines (count, width) of places: Vaswani et al. 2017, "Attention Is All You Need", 3.5."""
    angles = torch.arange(count, device=device)[:, None] * torch.exp(
        torch.arange(0, width, 2, device=device) * (-math.log(10000.0) / width)
    )
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class Listener(nn.Module):
    """Writes what is heard in one recording, or in two."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.spectrogram = LogMel()
        self.halve = nn.Sequential(
            nn.Conv1d(MELS, width, 3, stride=2, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, stride=2, padding=1)
        )
        self.encoder = self._layers(1)
        self.which = nn.Parameter(torch.randn(2, width) / width**0.5)  # first or second recording
        self.words = nn.Embedding(words + 1, width)  # The last one starts a text.
        self.decoder = self._layers(layers)
        self.output = nn.Linear(width, words)

    def _layers(self, count: int) -> nn.TransformerEncoder:
        layer = nn.TransformerEncoderLayer(
            self.width, HEADS, 2 * self.width, dropout=0.0, batch_first=True, norm_first=True
        )
        return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)

    def forward(self, audio: Tensor, lengths: Tensor, texts: Tensor) -> Tensor:
        """Return logits (batch, length, words) of each word of the texts."""
        return self.predict(*self.listen(audio, lengths), texts[:, :-1])

    def listen(self, audio: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was heard (batch, places, width), and which places hold nothing."""
        batch = len(audio)
        bands = self.spectrogram(audio.flatten(0, 1))
        frames = self.halve(bands.transpose(1, 2)).transpose(1, 2)
        count = frames.shape[1]
        # A quarter of the frames; of a recording that is not there one counts here, which the decoder does not see.
        valid = (lengths.flatten() // HOP // 4 + 1).clamp(max=count)
        empty = torch.arange(count, device=audio.device) >= valid[:, None]
        heard = self.encoder(frames + positions(count, self.width, audio.device), src_key_padding_mask=empty)
        heard = heard.view(batch, 2, count, -1) + self.which[:, None]
        empty = empty.view(batch, 2, count) | (lengths == 0)[:, :, None]
        return heard.flatten(1, 2), empty.flatten(1)

    def predict(self, heard: Tensor, empty: Tensor, texts: Tensor) -> Tensor:
        """Return logits (batch, length + 1, words) of the words of texts (batch, length), and of one behind them."""
        started = functional.pad(texts, (1, 0), value=self.words.num_embeddings - 1)
        count, length = heard.shape[1], started.shape[1]
        written = self.words(started) + positions(length, self.width, heard.device)
        mask = torch.ones(count + length, count + length, dtype=torch.bool, device=heard.device).triu(1)
        unseen = functional.pad(empty, (0, length), value=False)
        hidden = self.decoder(torch.cat([heard, written], 1), mask, src_key_padding_mask=unseen)
        return self.output(hidden[:, count:])

    @torch.no_grad()
    def write(self, audio: Tensor, lengths: Tensor, length: int, beam: int) -> Tensor:
        """Return the likeliest texts (batch, length) that a search with so many beams finds; 1 beam: greedily."""
        heard, empty = (each.repeat_interleave(beam, 0) for each in self.listen(audio, lengths))
        batch, texts = len(audio), audio.new_zeros(len(heard), 0, dtype=torch.int64)
        scores = audio.new_full((batch, beam), -math.inf)
        scores[:, 0] = 0.0  # At first all beams are the same.
        for _ in range(length):
            likely = self.predict(heard, empty, texts)[:, -1].float().log_softmax(1)
            if texts.shape[1]:  # Behind END nothing but END follows.
                ended = texts[:, -1] == END
                likely[ended] = -math.inf
                likely[ended, END] = 0.0
            words = likely.shape[1]
            scores, chosen = (scores[:, :, None] + likely.view(batch, beam, words)).flatten(1).topk(beam)
            rows = chosen // words + beam * torch.arange(batch, device=audio.device)[:, None]
            texts = torch.cat([texts[rows.flatten()], (chosen % words).view(-1, 1)], 1)
        return texts.view(batch, beam, length)[:, 0]
