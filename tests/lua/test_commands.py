"""The scripts use commands of Redis 6.2 alone, which Valkey has as well."""

from __future__ import annotations

import re

import pytest

from celery_relock.backends.redis.scripts import scripts

A_CALL = r"redis\.p?call\('(\w+)'"
#: Redis 7 has more functions to call than this.
FUNCTIONS = {"call", "pcall"}


def test_every_command_of_the_scripts_is_known_to_the_server(desk):
    used = {name for script in scripts().values() for name in re.findall(A_CALL, script.source)}

    assert len(used) > 20
    assert _unknown(desk, used) == set()
    # The test would see one.
    assert _unknown(desk, {"GET", "NOSUCH"}) == {"NOSUCH"}


def _unknown(desk, names):
    ask = "return redis.call('COMMAND', 'INFO', ARGV[1])[1] and 1 or 0"
    return {name for name in names if not desk.client.eval(ask, 0, name)}


@pytest.mark.parametrize("verb", sorted(scripts()))
def test_a_script_calls_commands_by_name_and_nothing_else_of_redis(verb):
    source = re.sub(r"--.*", "", scripts()[verb].source)

    assert set(re.findall(r"redis\.(\w+)", source)) <= FUNCTIONS
    assert len(re.findall(r"redis\.p?call\(", source)) == len(re.findall(A_CALL, source))
