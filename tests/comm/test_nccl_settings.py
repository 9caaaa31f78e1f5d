"""The variables that say how each lane uses NCCL. They are read without a GPU."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.launcher import run_ranks

from fsdp_ext.comm.nccl_settings import (
    NcclSettings,
    nccl_host,
    nccl_settings,
    pack_multiprocessors,
)
from fsdp_ext.comm.rendezvous import Rendezvous

GATHER, REDUCE = "FSDP_EXT_NCCL_GATHER", "FSDP_EXT_NCCL_REDUCE"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (GATHER, REDUCE, "FSDP_EXT_NCCL_REGISTER"):
        monkeypatch.delenv(variable, raising=False)


def test_what_is_not_set_is_left_to_nccl() -> None:
    assert nccl_settings() == NcclSettings(registers_buffers=True, gather={}, reduce={})


def test_each_lane_has_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATHER, "cta_policy=zero, cluster_size=0")
    monkeypatch.setenv(REDUCE, "min_ctas=2,max_ctas=8,cta_policy=efficiency")
    found = nccl_settings()
    assert found.gather == {"cta_policy": 2, "cluster_size": 0}
    assert found.reduce == {"min_ctas": 2, "max_ctas": 8, "cta_policy": 1}
    assert str(found) == (
        "FSDP_EXT_NCCL_REGISTER=1, FSDP_EXT_NCCL_GATHER=cluster_size=0,cta_policy=zero, "
        "FSDP_EXT_NCCL_REDUCE=cta_policy=efficiency,max_ctas=8,min_ctas=2"
    )
    monkeypatch.setenv("NCCL_CTA_POLICY", "1")
    assert str(found).endswith(", NCCL_CTA_POLICY=1")


@pytest.mark.parametrize(
    "text",
    [
        "max_ctas",
        "max_ctas=0",
        "max_ctas=65",
        "max_ctas=8,max_ctas=9",
        "max_ctas=-1",
        "max_ctas=\u0664",  # a digit, but not one of ASCII
        "ctas=2",
        "cluster_size=9",
        "cta_policy=1",
        "cta_policy=fast",
    ],
)
def test_a_variable_of_another_form_says_what_may_be_in_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(GATHER, text)
    with pytest.raises(ValueError, match=r"FSDP_EXT_NCCL_GATHER is .*'max_ctas=8,cta_policy="):
        nccl_settings()


@pytest.mark.parametrize(("text", "registers"), [("0", False), ("1", True), ("", True)])
def test_registration_may_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, text: str, registers: bool
) -> None:
    monkeypatch.setenv("FSDP_EXT_NCCL_REGISTER", text)
    assert nccl_settings().registers_buffers == registers


@pytest.mark.parametrize("text", ["false", "off", "no", "2"])
def test_registration_is_not_left_on_by_a_word(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FSDP_EXT_NCCL_REGISTER", text)
    with pytest.raises(ValueError, match=rf"FSDP_EXT_NCCL_REGISTER is '{text}'\. Pass 1 or 0"):
        nccl_settings()


def test_settings_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDUCE, "min_ctas=9,max_ctas=8")
    with pytest.raises(ValueError, match="a larger min_ctas than max_ctas"):
        nccl_settings()
    monkeypatch.setenv(REDUCE, "cta_policy=zero")
    with pytest.raises(ValueError, match="copy engines cannot add"):
        nccl_settings()
    monkeypatch.setenv(REDUCE, "")
    monkeypatch.setenv(GATHER, "cta_policy=zero")
    monkeypatch.setenv("FSDP_EXT_NCCL_REGISTER", "0")
    with pytest.raises(ValueError, match="copy engines need registered buffers"):
        nccl_settings()


def test_the_policy_may_be_left_to_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATHER, "cta_policy=auto")
    monkeypatch.setenv(REDUCE, "cta_policy=auto")
    assert nccl_settings().gather == nccl_settings().reduce == {"cta_policy": -1}
    assert "FSDP_EXT_NCCL_GATHER=cta_policy=auto" in str(nccl_settings())


def test_lanes_between_replicas_gather_nothing_by_copy_engines() -> None:
    settings = NcclSettings(gather={"cta_policy": 2, "max_ctas": 4}, reduce={"max_ctas": 8})
    expected = NcclSettings(gather={"max_ctas": 4}, reduce={"max_ctas": 8})
    assert settings.between_replicas() == expected


def test_a_host_is_what_nccl_takes_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    mine = nccl_host()
    monkeypatch.setattr("platform.node", lambda: "a container")
    assert nccl_host() != mine
    monkeypatch.setenv("NCCL_HOSTID", "one")
    assert nccl_host() == "one"


def _differ() -> str:
    assert dist.group.WORLD is not None
    rendezvous = Rendezvous(dist.group.WORLD, b"", timedelta(seconds=60))
    rendezvous.exchange("settings", b"")
    one, other = str(NcclSettings()), str(NcclSettings(reduce={"max_ctas": 4}))
    rendezvous.check_equal([one, one], "settings", "Agree.")
    with pytest.raises(RuntimeError) as raised:
        rendezvous.check_equal([one, other], "settings", "Agree.")
    return str(raised.value)


def test_ranks_that_differ_name_themselves_and_each_other() -> None:
    first, second = run_ranks(_differ, 2)
    assert re.fullmatch(
        r"rank 0 asks for settings .*, and rank 1 for .*max_ctas=4\. Agree\.", first
    )
    assert re.fullmatch(r"rank 1 asks for settings .*max_ctas=4, and rank 0 for .*", second)


def test_packing_runs_on_all_multiprocessors_or_as_many_as_the_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "FSDP_EXT_PACK_MULTIPROCESSORS"
    monkeypatch.delenv(variable, raising=False)
    assert pack_multiprocessors() == 0
    monkeypatch.setenv(variable, "24")
    assert pack_multiprocessors() == 24
    for text in ("0", "-1", "all", "1.5", str(1 << 31)):
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"{variable} is '{text}'. Pass a number"):
            pack_multiprocessors()
