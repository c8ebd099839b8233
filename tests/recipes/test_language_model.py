"""The language model recipe: what it learns, that ranks and strategies agree, and what it writes for others to load."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

RECIPE = Path(__file__).parents[2] / "recipes" / "language-model"
SIZE = ["--layers=2", "--heads=2", "--width=16", "--sequence-length=32"]
SMALL = [*SIZE, "--batch-size=8", "--warmup=2", "--log-every=1", "--steps=4"]
NORM = re.compile(r"gradient norm (\d+\.\d+)")
HELD_OUT = re.compile(r"Step (\d+): loss on held-out text (\d+\.\d{4})")


@pytest.fixture
def train(warm_ranks, tmp_path):
    """Give a function that trains on a small text, in a directory of its own; it gives the records of the steps."""
    text = tmp_path / "text.txt"
    known = ["the", "a", "fox", "hen", "sees", "hears", "big", "red", "old", "and", "but\0"]
    words = random.Random(1).choices(known, k=1500)
    text.write_text(" ".join(words))

    def run(name, *args, ranks=1):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = ["--data", text, *SMALL, "--checkpoint-dir", folder / "checkpoints", *args]
        done = warm_ranks.run_ranks(RECIPE / "train.py", words, folder, ranks, CUDA_VISIBLE_DEVICES="")
        assert [code for code, _, _ in done] == [0] * ranks, done
        records = map(json.loads, next(folder.rglob("metrics.jsonl")).read_text().splitlines())
        return [(each["step"], each["loss"]) for each in records if "loss" in each], done[0][1].decode()

    return run


def test_the_job_file_reaches_its_loss_with_two_ranks(allranks):
    """It takes more than 10 s: it is a whole training."""
    job = RECIPE / "job.yaml"
    done = allranks("run", job, "--nproc-per-node", "2", timeout=600, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 0, done.stderr
    losses = HELD_OUT.findall(done.stdout)
    assert [int(step) for step, _ in losses] == [150, 300]
    assert float(losses[1][1]) < 0.4  # 5.5 before the first step.
    assert len(re.findall(r"^\[0\] Step \d+: loss .* tokens/s$", done.stdout, re.MULTILINE)) == 6


def test_the_losses_are_those_of_one_rank_on_two_and_four_with_every_strategy(train):
    """Ranks add the same gradients in another order: single precision's 2^-24, which Adam's first steps enlarge.

    It takes more than 10 s: three trainings, one of them of four ranks.
    """
    alone, shown = train("alone")
    norms = [float(norm) for norm in NORM.findall(shown)]
    assert len(norms) == 4
    assert [step for step, _ in alone] == [1, 2, 3, 4]
    for ranks, options in (
        (2, ["--strategy", "ddp", "--accumulate", "2"]),
        (4, ["--strategy", "fsdp", "--checkpoint-activations"]),
    ):
        losses, out = train(f"{ranks}{''.join(options)}", *options, ranks=ranks)
        assert f"Processes: {ranks} on cpu" in out
        assert [step for step, _ in losses] == [1, 2, 3, 4]
        # Adam does not mind the scale of gradients, but their norm shows it; it is printed with three digits.
        assert [float(norm) for norm in NORM.findall(out)] == pytest.approx(norms, abs=2e-3)
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in alone], rel=1e-5), options
    narrow, _ = train("bf16", "--precision", "bf16", "--strategy", "fsdp", ranks=2)
    assert narrow != alone
    assert [loss for _, loss in narrow] == pytest.approx([loss for _, loss in alone], rel=2**-7)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_continued_from_the_middle_it_equals_an_undisturbed_training_to_the_bit(train, tmp_path, strategy):
    """It takes more than 10 s on a slow machine: two trainings of two ranks."""
    options = ["--strategy", strategy, "--save-every", "2", "--accumulate", "2"]
    whole, _ = train("whole", *options, ranks=2)
    checkpoints = tmp_path / "whole" / "checkpoints"
    (tmp_path / "continued").mkdir()
    shutil.copytree(checkpoints / "step-000000002", tmp_path / "continued" / "checkpoints" / "step-000000002")
    continued, _ = train("continued", *options, ranks=2)
    assert continued == whole[2:]
    data = sorted((checkpoints / "step-000000004").glob("rank-*.data"))
    assert len(data) == (2 if strategy == "fsdp" else 1)
    for path in data:
        assert (tmp_path / "continued" / "checkpoints" / "step-000000004" / path.name).read_bytes() == path.read_bytes()


def gpt2_logits(tensors, heads, tokens):
    """Compute a GPT-2 (Radford et al. 2019) from its tensors by their published names, one sequence at a time.

    Weights of layers have the shape (inputs, outputs); the last layer's is that of the token embedding.
    """

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def layer(x, name):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    length = len(tokens)
    x = tensors["wte.weight"][tokens] + tensors["wpe.weight"][:length]
    for at in range(sum(name.endswith("ln_1.bias") for name in tensors)):
        query, key, value = layer(norm(x, f"h.{at}.ln_1"), f"h.{at}.attn.c_attn").chunk(3, dim=-1)
        seen = []
        for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True):
            scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(torch.ones(length, length).triu(1) > 0, -math.inf)
            seen.append(scores.softmax(-1) @ v)
        x = x + layer(torch.cat(seen, -1), f"h.{at}.attn.c_proj")
        hidden = layer(norm(x, f"h.{at}.ln_2"), f"h.{at}.mlp.c_fc")
        wide = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + layer(wide, f"h.{at}.mlp.c_proj")
    return norm(x, "ln_f") @ tensors["wte.weight"].T


TOKENS = torch.tensor([0, *b"the old hen"])


@pytest.fixture
def exported(train, recipe, tmp_path):
    """Train sharded over two ranks and export; give the folder, and the logits of the recipe's own model."""
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    train("exported", "--strategy", "fsdp", "--export", tmp_path / "gpt2", ranks=2)
    model = recipe["model"].GPT(recipe["model"].Shape(256, 32, 2, 2, 16), 0)
    model.load_state_dict(load_file(tmp_path / "gpt2" / "model.safetensors"))
    return tmp_path / "gpt2", model(TOKENS[None])[0].detach()


def test_what_a_sharded_training_exports_is_a_gpt2(exported):
    from safetensors.torch import load_file

    folder, logits = exported
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert {name: [*tensor.shape] for name, tensor in tensors.items() if name.startswith("h.1.") or name[0] == "w"} == {
        "wte.weight": [256, 16],
        "wpe.weight": [32, 16],
        "h.1.ln_1.weight": [16],
        "h.1.ln_1.bias": [16],
        "h.1.attn.c_attn.weight": [16, 48],
        "h.1.attn.c_attn.bias": [48],
        "h.1.attn.c_proj.weight": [16, 16],
        "h.1.attn.c_proj.bias": [16],
        "h.1.ln_2.weight": [16],
        "h.1.ln_2.bias": [16],
        "h.1.mlp.c_fc.weight": [16, 64],
        "h.1.mlp.c_fc.bias": [64],
        "h.1.mlp.c_proj.weight": [64, 16],
        "h.1.mlp.c_proj.bias": [16],
    }
    assert (config["model_type"], config["n_layer"], config["n_head"], config["n_embd"]) == ("gpt2", 2, 2, 16)
    torch.testing.assert_close(gpt2_logits(tensors, config["n_head"], TOKENS), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # Those of another project.
def test_transformers_loads_what_was_exported(exported):
    """It takes more than 10 s: it imports transformers."""
    transformers = pytest.importorskip("transformers")
    folder, logits = exported
    model, loading = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"]
    torch.testing.assert_close(model(TOKENS[None]).logits[0].detach(), logits, rtol=1e-5, atol=1e-5)


def test_documents_in_a_sequence_do_not_see_each_other(recipe):
    torch.manual_seed(0)
    model = recipe["model"].GPT(recipe["model"].Shape(16, 12, 2, 2, 8), separator=0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    first, second = torch.tensor([0, 5, 6, 7, 3]), torch.tensor([0, 9, 8, 2, 2, 4])
    packed = model(torch.cat([first, second])[None])[0]
    for alone, part in ((first, packed[:5]), (second, packed[5:])):
        torch.testing.assert_close(model(alone[None])[0], part)
    model.separator = None
    assert (model(torch.cat([first, second])[None])[0, 5:] - packed[5:]).abs().max() > 0.1


def test_texts_are_packed_without_padding(recipe, tmp_path):
    data = recipe["data"]
    (tmp_path / "a.txt").write_bytes(b"abc<|endoftext|>defg")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"hijkl")
    text = data.load(tmp_path, 4, 256)
    sequences = [bytes(each.tolist()) for part in (text.training, text.held_out) for (each,) in part]
    assert sequences == [b"\0abc\0", b"\0defg", b"g\0hij"]
    assert (len(text.held_out), text.entropy) == (1, None)
    numbers = tmp_path / "tokens.bin"
    numbers.write_bytes(b"".join(number.to_bytes(2, "little") for number in (50256, 1, 40000, 2, 3, 4, 5)))
    (tokens,) = data.load(numbers, 3, 50257).training[0]
    assert (tokens.long() & 0xFFFF).tolist() == [50256, 1, 40000, 2]
    with pytest.raises(SystemExit, match="holds the token 50256\n  fix: --vocab-size 50257 or more"):
        data.load(numbers, 3, 50000)


def test_the_entropy_of_a_made_story_is_that_of_its_choices(recipe):
    tokens, entropy = recipe["data"].made_stories(1)
    first, *events = re.split(r"(?= At the )", bytes(tokens.tolist()).decode())
    have = int(re.search(r"has (\d+)", first)[1])
    options = [12, 8, 12, 9, 3]
    for event in events:
        gives = "gives" in event
        options += [6, 2, have if gives else 9]
        assert int(re.search(r"(finds|away) (\d+)", event)[2]) <= options[-1]
        have = int(re.search(r"has (\d+)", event)[1])
    assert entropy * len(tokens) == pytest.approx(sum(map(math.log, options)))


def test_schedule_and_operations_are_those_of_their_sources(recipe):
    rates = [recipe["train"].warmup_then_cosine(step, 4, 12) for step in (0, 3, 4, 8, 12)]
    assert rates == pytest.approx([0.25, 1, 1, 0.55, 0.1])
    with torch.device("meta"):
        model = recipe["model"].GPT(recipe["model"].Shape(50257, 1024, 12, 12, 768), None)
    # The smallest GPT-2 has 124,439,808 parameters, 786,432 of them for positions.
    assert sum(each.numel() for each in model.parameters()) == 124_439_808
    assert model.flops_per_token() == 6 * (124_439_808 - 786_432) + 12 * 12 * 12 * 64 * 1024


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--data", "nowhere"], "error: there is no file or directory nowhere\n  fix: --data FILE"),
        (["--data", "empty"], "error: empty has no files *.txt\n  fix: a directory with text files"),
        (["--data", "short.txt"], "error: short.txt has 6 tokens, too few for sequences of 128\n"),
        (["--width", "30"], "error: --width 30 does not divide by --heads 4"),
        (["--accumulate", "3"], "error: --batch-size 16 does not divide by --accumulate 3"),
        (["--steps", "many"], "error: argument --steps: invalid positive value: 'many'"),
        (["--lr", "0"], "error: --lr, --clip-norm and --peak-tflops must be greater than 0"),
        (["--warmup", "-1"], "error: --warmup and --weight-decay must be 0 or more"),
        (["--heads", "0"], "error: argument --heads: invalid positive value: '0'"),
    ],
)
def test_wrong_arguments_and_missing_data_are_named(warm_ranks, tmp_path, args, text):
    """The first one takes more than 10 s on a slow machine: torch is imported for all of them."""
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty").mkdir()
    done = warm_ranks.run_ranks(RECIPE / "train.py", args, tmp_path, 2, CUDA_VISIBLE_DEVICES="")
    for code, _, err in done:
        assert code in (1, 2)
        assert text in err.decode()
        assert "Traceback" not in err.decode()
