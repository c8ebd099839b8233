"""Which variables the ranks get from us, and which of them debug turns on."""

from __future__ import annotations

from allranks.job.spec import Environment, Job, Launch
from allranks.plan import environment
from allranks.plan.layout import Layout
from allranks.plan.plan import Plan, Reason

LAYOUT = Layout(nproc_per_node=2, backend="gloo", cpus=8, reasons=())
DEBUG = ("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES")


def plan(reasons: tuple[Reason, ...]) -> Plan:
    return Plan(
        run_id="x",
        name="x",
        cluster="local",
        kind="local",
        run_dir="/x",
        workdir="/x",
        nnodes=1,
        nproc_per_node=2,
        backend="gloo",
        stop_timeout=1.0,
        files=(),
        commands=(),
        secrets=(),
        reasons=reasons,
        notes=(),
        group_readable=False,
    )


def test_a_plan_knows_what_debug_turned_on():
    made = plan(environment.settings(Job(script="t", debug=True), LAYOUT, {}))
    assert [reason.subject for reason in made.debug] == [*DEBUG, "PYTHONFAULTHANDLER"]
    assert {reason.value for reason in made.debug} == {"INFO", "DETAIL", "1"}
    assert plan(environment.settings(Job(script="t"), LAYOUT, {})).debug == ()


def test_what_others_have_set_is_not_what_debug_turned_on():
    given = Environment(variables={"NCCL_DEBUG": "WARN"})
    job, environ = Job(script="t", debug=True, environment=given), {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    made = plan((*environment.settings(job, LAYOUT, environ), *environment.kept(job, LAYOUT, environ)))
    assert [reason.subject for reason in made.debug] == [*DEBUG[2:], "PYTHONFAULTHANDLER"]


def test_secrets_travel_in_the_environment_only():
    given = {"HF_TOKEN": "hf_0123456789", "URL": "https://u:hf_0123456789@h", "PLAIN": "x", "PIN_KEY": "1234"}
    job = Job(script="t", environment=Environment(variables=given))
    assert environment.secrets(job) == ("HF_TOKEN", "URL", "PIN_KEY")
    shown = {reason.subject: reason.value for reason in environment.settings(job, LAYOUT, {})}
    assert shown["PLAIN"] == "x"
    assert not {"HF_TOKEN", "URL", "PIN_KEY"} & set(shown)


def test_an_interface_is_named_to_both():
    job = Job(script="t", launch=Launch(interface="ib0"))
    shown = {reason.subject: reason.value for reason in environment.settings(job, LAYOUT, {})}
    assert (shown["GLOO_SOCKET_IFNAME"], shown["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")
