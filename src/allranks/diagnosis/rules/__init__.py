"""All rules, in families; of rules of one level the first in this order that matches a line has it."""

from __future__ import annotations

from allranks.diagnosis.model import Rule
from allranks.diagnosis.rules import environment, files, gpu, jobs, memory, network, script, tensors

RULES: tuple[Rule, ...] = (
    *jobs.RULES,
    *memory.RULES,
    *gpu.RULES,
    *files.RULES,
    *environment.RULES,
    *network.RULES,
    *tensors.RULES,
    *script.RULES,
)
