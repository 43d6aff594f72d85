"""Planted faults: small wrong plugins, the kit run on them in a process of its own, and what it said."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from cosmos_core.protocols import KINDS, Kind
from cosmos_core.protocols.provider import entry_point_group
from cosmos_service_check.recorder import Outcome, run_pytest
from tests.processes import forked

pytest.register_assert_rewrite("tests.nightly.kit.faulty_algorithm")

RunKit = Callable[..., dict[str, list[Outcome]]]

KIT_S: Final = 280.0
"""Longest time for a kit's run on all small plugins of a file; about 40 s on an idle machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(KIT_S + 20))


@pytest.fixture(scope="module")
def run_kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    """Run the kit of a kind on several small plugins at once.

    `run_kit(kind, {name: module source}, body=..., bodies={name: class body})` gives each name its outcomes. `body`
    and `bodies` are what the test classes add to the kit: fixtures, class variables. `kit` is the name of the kit's
    class, where it is not the kind's.
    """

    def run(
        kind: Kind,
        modules: Mapping[str, str],
        *,
        header: str = "",
        body: str = "",
        bodies: Mapping[str, str] = {},
        kit: str = "",
    ) -> dict[str, list[Outcome]]:
        assert kind in KINDS
        kit = kit or f"{kind.capitalize()}Conformance"
        folder = tmp_path_factory.mktemp(f"faulty-{kind}")
        entries = []
        tests = [f"from cosmos_core.testing import {kit}", "import pytest", header]
        for index, (name, source) in enumerate(modules.items()):
            module = f"faulty_{kind}_{name.replace('-', '_')}"
            (folder / f"{module}.py").write_text(textwrap.dedent(source))
            entries.append(f"{name} = {module}")
            inside = textwrap.dedent(body) + textwrap.dedent(bodies.get(name, ""))
            tests.append(f"class Test{index}({kit}):\n    plugin = {name!r}")
            tests.append(textwrap.indent(inside, "    "))
        info = folder / "faulty-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{entry_point_group(kind)}]", *entries]) + "\n")
        (folder / "test_faulty.py").write_text("\n".join(tests) + "\n")
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", forked)
            outcomes = run_pytest(folder, timeout_s=KIT_S, environment={"PYTHONPATH": path})
        return {name: [each for each in outcomes if each.plugin == name] for name in modules}

    return run
