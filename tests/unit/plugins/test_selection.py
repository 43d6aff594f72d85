import contextlib
import sys

import attrs
import pytest

from cosmos_core.errors import (
    ConfigError,
    DataError,
    PluginBrokenError,
    PluginConflictError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from cosmos_core.plugins import compatibility
from cosmos_core.plugins.choice import kind_of
from cosmos_core.plugins.discovery import DISABLE_VARIABLE, discover
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RewardCapabilities, RewardContext, hookimpl

REWARD = """
import attrs
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Provider, RewardCapabilities, hookimpl

@attrs.frozen(kw_only=True)
class Options:
    length: int = 3

class Short:
    def __init__(self, options, context):
        self.options, self.context = options, context
        if options.length == 13:
            raise DataError("13 rows are too many")
        if options.length == 12:
            raise ConfigError("length: 12 is a dozen")
        if options.length == 11:
            raise ConfigError("width: 11 is none of the options")
        if options.length == 14:
            raise ZeroDivisionError("oh")

@hookimpl
def cosmos_reward():
    return Provider(create=Short, options=Options, capabilities=RewardCapabilities())
"""
CONTEXT = RewardContext(name="short", seed=1)


@pytest.fixture
def make_reward(make_distribution):
    def make(source: str = REWARD, name: str = "acme-a", **changes):
        module = name.replace("-", "_")
        make_distribution(name, entries={"reward/short": module}, modules={f"{module}.py": source}, **changes)

    return make


def load_short() -> PluginSet:
    return PluginSet.load([("reward", "short")])


def test_a_selected_plugin_is_imported_registered_and_made(make_reward, make_distribution):
    make_reward()
    plugins = PluginSet.load([("reward", "short"), ("reward", "short")])
    reward = plugins.create("reward", "short", {"length": 4}, CONTEXT, "reward.0.options")
    assert (reward.options.length, reward.context) == (4, CONTEXT)
    assert [name for name, _ in plugins.manager.list_name_plugin()] == ["reward:short"]
    assert [record.distribution for record in plugins] == ["acme-a"]
    assert plugins.provider("reward", "short").capabilities == RewardCapabilities()
    make_reward()
    make_distribution("acme-b", entries={"reward/bad": "acme_b"}, modules={"acme_b.py": "raise RuntimeError('no')"})
    load_short()
    assert "acme_b" not in sys.modules
    make_reward()
    assert load_short().manager is not load_short().manager
    make_reward(REWARD.replace(", capabilities=RewardCapabilities()", ""))
    assert load_short().provider("reward", "short").capabilities == RewardCapabilities()


def test_wrong_options_are_errors_at_their_path(make_reward):
    make_reward()
    with pytest.raises(ConfigError, match=r"^reward\.0\.options\.lenght: unknown option; did you mean length\?$"):
        load_short().create("reward", "short", {"lenght": 1}, CONTEXT, "reward.0.options")
    with pytest.raises(ConfigError, match=r"^reward\.options\.length: expected an integer"):
        load_short().create("reward", "short", {"length": "4"}, CONTEXT)
    make_reward()
    plugins = load_short()
    with pytest.raises(ConfigError, match=r"^reward\.0\.options\.length: 12 is a dozen$"):
        plugins.create("reward", "short", {"length": 12}, CONTEXT, "reward.0.options")
    with pytest.raises(ConfigError, match=r"^width: 11 is none of the options$"):
        plugins.create("reward", "short", {"length": 11}, CONTEXT, "reward.0.options")


def test_a_plugins_own_error_passes_and_any_other_is_chained(make_reward):
    make_reward()
    plugins = load_short()
    with pytest.raises(DataError, match="13 rows"):
        plugins.create("reward", "short", {"length": 13}, CONTEXT)
    with pytest.raises(PluginBrokenError, match=r"acme-a 1\.0.*could not be made: ZeroDivisionError: oh") as caught:
        plugins.create("reward", "short", {"length": 14}, CONTEXT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_unknown_name_is_met_with_the_nearest(make_reward):
    make_reward()
    with pytest.raises(PluginNotFoundError, match=r"no reward plugin named 'shrot' is installed; did you mean short\?"):
        PluginSet.load([("reward", "shrot")])
    make_reward()
    with pytest.raises(PluginNotFoundError, match="a reward plugin has that name"):
        PluginSet.load([("dataset", "short")])
    make_reward()
    with pytest.raises(PluginNotFoundError, match="by acme-z; it is installed by acme-a"):
        PluginSet.load([("reward", "acme-z:short")])


def test_a_known_name_is_met_with_its_install_line(monkeypatch):
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    with pytest.raises(PluginNotFoundError, match="pip install cosmos-algorithm-grpo; COSMOS_DISABLE_PLUGIN_AUTOLOAD"):
        PluginSet.load([("algorithm", "dapo")])
    with pytest.raises(PluginNotFoundError, match=r"did you mean .*grpo.*pip install cosmos-algorithm-grpo"):
        PluginSet.load([("algorithm", "gpro")])


def test_every_missing_plugin_is_told_at_once_and_no_name_is_guessed(monkeypatch):
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    with pytest.raises(PluginNotFoundError) as caught:
        PluginSet.load([("reward", "Qx_Zw"), ("algorithm", "grpo"), ("dataset", "jsonl"), ("model", "hf")])
    lines = str(caught.value).splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "no reward plugin named 'Qx_Zw' is installed",
        "no algorithm plugin named 'grpo' is installed",
        "no dataset plugin named 'jsonl' is installed",
        "those of cosmos-core: pip install cosmos-algorithm-grpo cosmos-dataset-jsonl",
    ]
    assert "pip install" not in lines[0]


def test_two_distributions_conflict_until_one_is_named(make_reward):
    make_reward(name="acme-a")
    make_reward(name="acme-b")
    with pytest.raises(PluginConflictError, match=r"provided by acme-[ab] 1\.0 and by acme-[ab] 1\.0.*acme-a:short"):
        load_short()
    plugins = PluginSet.load([("reward", "Acme_B:short")])
    assert plugins.record("reward", "Acme_B:short").distribution == "acme-b"
    assert plugins.create("reward", "Acme_B:short", {}, CONTEXT).__class__.__module__ == "acme_b"
    both = PluginSet.load([("reward", "acme-a:short"), ("reward", "acme-b:short")])
    assert [type(both.create("reward", name, {}, CONTEXT)).__module__ for _, name in both._records] == [
        "acme_a",
        "acme_b",
    ]


def test_what_breaks_a_rule_is_no_rival_and_is_refused_where_it_is_meant(make_reward, make_distribution):
    make_reward()
    make_distribution("acme-b", entries="[cosmos_core.reward]\nshort = acme_b\n", modules={"acme_b.py": ""})
    make_distribution("acme-c", entries="[cosmos_core.dataset]\nshort = acme_c\n", modules={"acme_c.py": ""})
    assert load_short().record("reward", "short").distribution == "acme-a"
    assert kind_of("short", discover()) == "reward"
    with pytest.raises(PluginBrokenError, match=r"of acme-b 1\.0 cannot be used: its entry-point group"):
        PluginSet.load([("reward", "acme-b:short")])


def test_a_plugin_of_another_release_or_protocol_is_refused(make_reward):
    make_reward("raise RuntimeError('imported')", requires=("cosmos-core<0.1",))
    with pytest.raises(PluginIncompatibleError, match=r"requires cosmos-core<0\.1"):
        load_short()
    for protocol, message in [
        (2, r"version 2 of the reward protocol.*speaks 1; it needs a newer cosmos-core: pip install -U cosmos-core$"),
        (0, r"version 0 of the reward .* it needs a newer release of the plugin: pip install -U acme-a$"),
        ("'1'", "Provider.protocol is '1'; give the version it was written for, an integer such as 1"),
    ]:
        make_reward(REWARD.replace("options=Options,", f"options=Options, protocol={protocol},"))
        with pytest.raises(PluginIncompatibleError, match=message):
            load_short()


def test_a_deprecated_protocol_version_is_accepted_with_a_warning(make_reward, monkeypatch, caplog):
    make_reward()
    monkeypatch.setattr(compatibility, "PROTOCOL_VERSIONS", {"reward": 2})
    with pytest.raises(PluginIncompatibleError):
        load_short()
    monkeypatch.setattr(compatibility, "DEPRECATED_PROTOCOLS", {"reward": {1: "9.0"}})
    assert load_short().provider("reward", "short").protocol == 1
    (warning,) = caplog.messages
    assert "acme-a 1.0" in warning
    assert "version 1 of the reward protocol, which cosmos-core 9.0 will refuse; the current version is 2" in warning


def test_a_selected_and_broken_plugin_is_fatal(make_reward):
    for source, message in [
        ("import surely_not_there", "could not be imported: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("def f(:", "could not be imported: SyntaxError"),
        ("1 / 0", "could not be imported: ZeroDivisionError"),
        ("def cosmos_reward(): pass", r"no function cosmos_reward\(\) marked @hookimpl"),
        (REWARD.replace("return Provider", "return dict"), r"cosmos_reward\(\) returned {.*}, which is no Provider"),
        (REWARD.replace("return Provider", "Provider"), r"cosmos_reward\(\) returned None"),
        (REWARD.replace("def cosmos_reward", "async def cosmos_reward"), "coroutine function"),
        (REWARD.replace("return Provider", "1 / 0; Provider"), r"cosmos_reward\(\) failed: ZeroDivisionError"),
        (REWARD.replace("capabilities=RewardCapabilities()", "capabilities={}"), "{}, which is no RewardCapabilities"),
        (
            REWARD.replace("options=Options", "options=dict"),
            r"options class is unusable: .*dict.* no attrs class; write a class with @attrs\.frozen",
        ),
        (REWARD.replace("length: int", "length: complex"), "options class is unusable: .*complex"),
        (REWARD.replace("length: int", "length: 'Gone'"), "options class is unusable: .*Gone"),
        (REWARD.replace("create=Short", "create=3"), "not callable"),
        (
            REWARD.replace("create=Short", "preflight=print, create=Short"),
            r"preflight is <.*>; it is a function of an engine's",
        ),
        (REWARD.replace("cosmos_reward()", "cosmos_reward(options)"), "implements a hook wrongly"),
        (f"{REWARD}\n@hookimpl\ndef cosmos_step_finnished(): ...", "did you mean cosmos_step_finished"),
    ]:
        make_reward(source)
        with pytest.raises(PluginBrokenError, match=message) as caught:
            load_short()
        assert "short" in str(caught.value)


def test_what_a_provider_hook_says_passes(make_reward):
    make_reward(REWARD.replace("    return Provider(", "    raise DataError('install scorers')\n    return Provider("))
    with pytest.raises(DataError, match=r"^install scorers$"):
        load_short()


def test_the_original_exception_is_chained(make_reward):
    make_reward("1 / 0")
    with pytest.raises(PluginBrokenError) as caught:
        load_short()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_one_module_may_provide_several_kinds_and_names(make_distribution):
    source = REWARD + "@hookimpl\ndef cosmos_dataset():\n    return Provider(create=dict, options=Options)\n"
    text = "[cosmos_core.rewards]\nshort = acme_a\nbrief = acme_a\n[cosmos_core.datasets]\nrows = acme_a\n"
    make_distribution("acme-a", entries=text, modules={"acme_a.py": source})
    selections = [("reward", "short"), ("reward", "brief"), ("dataset", "rows")]
    plugins = PluginSet.load(selections)
    assert [(record.kind, record.name) for record in plugins] == selections
    assert plugins.provider("reward", "brief").create.__name__ == "Short"
    assert plugins.provider("dataset", "rows").create is dict


HALF = """
from cosmos_core.protocols import Provider, hookimpl

class Half:
    def __init__(self, options, context):
        for name in context:
            setattr(self, name, lambda: None)

@hookimpl
def cosmos_KIND():
    return Provider(create=Half)
"""


def test_an_optional_protocol_is_implemented_whole_or_not_at_all(make_distribution):
    for kind, members, message in [
        ("model", ("velocity", "render"), r"has velocity, render, and lacks latent_spec.* of `WorldModel`; give all"),
        ("model", ("render",), None),
        (
            "algorithm",
            ("settle",),
            r"has settle, and lacks summarise of `AdvantageEstimator`; give all",
        ),
        ("algorithm", ("summarise", "settle"), r"and lacks aggregation, .*imitation of `AdvantageEstimator`; give all"),
        ("model", ("stages", "advance"), r"has stages, advance, and lacks conclude of `PipelinedModel`; give all"),
        ("model", ("latent_spec", "velocity", "neutral_guidance", "render", "noised"), None),
    ]:
        make_distribution(
            "acme-a", entries={f"{kind}/half": "acme_a"}, modules={"acme_a.py": HALF.replace("KIND", kind)}
        )
        plugins = PluginSet.load([(kind, "half")])
        with pytest.raises(PluginBrokenError, match=message) if message else contextlib.nullcontext():
            plugins.create(kind, "half", {}, members)


def test_what_breaks_a_rule_of_the_core_is_refused_before_import(make_distribution):
    for entries, message in [
        ("[cosmos_core.rewards]\nshort = acme_a\n[cosmos_core.datasets]\nshort = acme_a\n", "rename one"),
        ("[cosmos_core.reward]\nshort = acme_a\n", r'write \[project\.entry-points\."cosmos_core\.rewards"\]'),
    ]:
        make_distribution("acme-a", entries=entries, modules={"acme_a.py": "raise RuntimeError('imported')"})
        with pytest.raises(PluginBrokenError, match=f"of acme-a 1.0 cannot be used: .*{message}"):
            load_short()


def test_a_wrong_name_is_told_before_anything_is_imported(make_reward):
    make_reward("raise RuntimeError('imported')")
    with pytest.raises(PluginNotFoundError):
        PluginSet.load([("reward", "short"), ("dataset", "nope")])


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []

    @hookimpl
    def cosmos_step_finished(self, step):
        self.steps.append(step)


HOOK = """
from cosmos_core.protocols import Provider, hookimpl

@hookimpl
def cosmos_hook():
    return Provider(create=lambda options, context: context)
"""


def test_an_attached_hook_is_called_and_a_misspelt_one_is_refused(make_distribution):
    make_distribution("acme-h", entries={"hook/note": "acme_h"}, modules={"acme_h.py": HOOK})
    plugins = PluginSet.load([("hook", "note")])
    recorder = plugins.create("hook", "note", {}, Recorder())
    plugins.attach("note", recorder)
    plugins.manager.hook.cosmos_step_finished(run=None, step=7, metrics={})
    assert recorder.steps == [7]

    @attrs.define
    class Misspelt:
        @hookimpl
        def cosmos_run_start(self):
            raise AssertionError

    other = PluginSet.load([("hook", "note")])
    with pytest.raises(PluginBrokenError, match="did you mean cosmos_run_started"):
        other.attach("note", Misspelt())


def test_capabilities_of_another_type_are_refused(make_distribution):
    for capabilities, message in [
        ('RewardCapabilities(payload_kinds="tokens")', r"RewardCapabilities\.payload_kinds: expected an array"),
        ("RewardCapabilities(deterministic=1)", r"RewardCapabilities\.deterministic"),
    ]:
        source = REWARD.replace("capabilities=RewardCapabilities()", f"capabilities={capabilities}")
        make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": source})
        with pytest.raises(PluginBrokenError, match=message):
            PluginSet.load([("reward", "short")])


def test_a_plugin_that_ends_the_process_at_import_is_named(make_distribution):
    make_distribution("acme-a", entries={"reward/short": "acme_a"}, modules={"acme_a.py": "import sys\nsys.exit(3)\n"})
    with pytest.raises(PluginBrokenError, match=r"'short' .*acme-a.* could not be imported: SystemExit: 3"):
        PluginSet.load([("reward", "short")])


JUDGED = """
from cosmos_core.protocols import Provider, hookimpl

class Hook:
    def __init__(self, options, context):
        raise RuntimeError("not made by planning")

    @hookimpl
    def {method}: ...

@hookimpl
def cosmos_hook():
    return Provider(create=Hook)
"""


def test_a_hook_is_judged_by_its_class_before_it_is_made(make_distribution):
    for method, message in [
        (
            "cosmos_run_start(self, run)",
            "'tell' .*acme-a.* implements cosmos_run_start, which is no hook; did you mean",
        ),
        ("cosmos_run_started(self, where)", r"'tell' .*acme-a.* implements a hook wrongly: .*where"),
    ]:
        make_distribution(
            "acme-a", entries={"hook/tell": "acme_a"}, modules={"acme_a.py": JUDGED.format(method=method)}
        )
        plugins = PluginSet.load([("hook", "tell")])
        with pytest.raises(PluginBrokenError, match=message):
            plugins.check_hook("tell")
    source = JUDGED.format(method="cosmos_run_started(self, run)")
    make_distribution("acme-a", entries={"hook/tell": "acme_a"}, modules={"acme_a.py": source})
    PluginSet.load([("hook", "tell")]).check_hook("tell")
