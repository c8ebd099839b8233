"""Secrets reach the ranks, and nothing that we write or show."""

from __future__ import annotations

import hashlib
from pathlib import Path

SECRETS = {
    "WANDB_API_KEY": "wandb-0123456789abcdef",
    "HF_TOKEN": "hf_$(touch pwned)'\"ZZZZ",
    "my_secret": "lower case, too é",
    "DB_PASSWORD": "x\ny;z 12345678",
}
SCRIPT = """\
import hashlib, os
for name in ("WANDB_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD", "FROM_CALLER_TOKEN"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest())
print("url", len(os.environ["URL"]))
"""
JOB = f"""\
script: train.py
environment:
  variables:
    WANDB_API_KEY: {SECRETS["WANDB_API_KEY"]}
    HF_TOKEN: "{SECRETS["HF_TOKEN"].replace('"', chr(92) + '"')}"
    URL: https://me:{SECRETS["WANDB_API_KEY"]}@example.org
"""
FLAGS = [
    "--env",
    f"my_secret={SECRETS['my_secret']}",
    "--env",
    f"DB_PASSWORD={SECRETS['DB_PASSWORD']}",
    "--env",
    "FROM_CALLER_TOKEN",
]
CALLER = "caller-0123456789"


def hashes() -> list[str]:
    wanted = {**SECRETS, "FROM_CALLER_TOKEN": CALLER}
    return [f"[0] {name} {hashlib.sha256(value.encode()).hexdigest()}" for name, value in wanted.items()]


def assert_clean(data: bytes, where: str) -> None:
    for name, value in {**SECRETS, "FROM_CALLER_TOKEN": CALLER}.items():
        forms = (value, value.encode("unicode_escape").decode(), repr(value)[1:-1], *value.split("\n"))
        for form in (form for form in forms if len(form) >= 8):
            assert form.encode() not in data, f"{name} stands in {where}"


def test_secrets_reach_the_ranks_and_nothing_else(allranks, tmp_path: Path):
    allranks.script(SCRIPT)
    allranks.job(JOB)
    caller = {"FROM_CALLER_TOKEN": CALLER}
    # URL is not a secret by its name, but holds the value of one.
    result = allranks("run", *FLAGS, **caller)
    assert result.rc == 0, result.stderr
    assert result.stdout.splitlines() == [*hashes(), f"[0] url {len('https://me:@example.org') + 22}"]
    assert_clean(result.err, "stderr of run")
    for file in allranks.run().rglob("*"):
        if file.is_file():
            assert_clean(file.read_bytes(), str(file))
    for verb in (("status",), ("status", "--json"), ("ps", "--json"), ("logs",)):
        said = allranks(*verb, **caller)
        assert_clean(said.out + said.err, " ".join(verb))
    for flags in ([], ["--json"], ["--sources"], ["--sources", "--json"], ["--debug", "-v"]):
        said = allranks("plan", *flags, *FLAGS, **caller)
        assert said.rc == 0
        assert_clean(said.out + said.err, f"plan {flags}")
    assert not list(tmp_path.rglob("pwned"))


def test_secrets_of_an_error(allranks):
    allranks.script(SCRIPT)
    allranks.job(JOB)
    for extra in (["--nproc-per-node", SECRETS["WANDB_API_KEY"]], ["--backend", "mpi"], ["--on", "x"]):
        said = allranks("run", *FLAGS, *extra, FROM_CALLER_TOKEN=CALLER)
        assert said.rc == 2
        assert_clean(said.out + said.err, " ".join(extra[:1]))


def test_recorded_job_names_the_secrets_without_their_values(allranks):
    allranks.script(SCRIPT)
    allranks.job(JOB)
    assert allranks("run", *FLAGS, FROM_CALLER_TOKEN=CALLER).rc == 0
    text = (allranks.run() / "job.yaml").read_text()
    for name in (*SECRETS, "FROM_CALLER_TOKEN", "URL"):
        assert f'{name}: "<secret>"' in text
    again = {**SECRETS, "FROM_CALLER_TOKEN": CALLER, "URL": f"https://me:{SECRETS['WANDB_API_KEY']}@example.org"}
    result = allranks("run", allranks.run() / "job.yaml", "--workdir", allranks.folder, **again)
    assert (result.rc, result.stdout.splitlines()[-1]) == (0, f"[0] url {len(again['URL'])}"), result.stderr
    refused = allranks("run", allranks.runs()[0] / "job.yaml", **{**again, "URL": None})
    assert (refused.rc, "URL is not set here" in refused.stderr) == (2, True)


def test_secret_in_a_text_of_the_job_starts_nothing_and_writes_nothing(allranks):
    allranks.script(SCRIPT)
    for text in ("environment: {setup: 'login 0123456789-mine'}", "args: [--key, 0123456789-mine]"):
        allranks.job(f"script: train.py\n{text}\n")
        for verb in (["run"], ["plan"], ["plan", "--sources"]):
            said = allranks(*verb, WANDB_API_KEY="0123456789-mine")
            assert (said.rc, said.stdout) == (2, "")
            assert "the value of WANDB_API_KEY stands in" in said.stderr
            assert "0123456789" not in said.stderr
    assert allranks.runs() == []
