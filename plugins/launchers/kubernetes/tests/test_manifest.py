import json
import re
import tomllib
from pathlib import Path, PurePosixPath

import attrs
import jsonschema
import kubernetes_validate
import pytest
import yaml

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import LauncherContext, Pool
from cosmos_launcher_kubernetes.launcher import KubernetesLauncher
from cosmos_launcher_kubernetes.options import KubernetesOptions

# The schema of a JobSet, as its custom resource definition has it.
JOBSET = json.loads(Path(__file__).with_name("jobset.json").read_text())
RECIPE = 'x = "a\\tb # \\u00e9"\n\n[table]\ny = [1]\n'
CONTEXT = LauncherContext(
    name="Big.Run_7",
    directory=PurePosixPath("/runs/team/Big.Run_7"),
    pools=(
        Pool(role="policy", replicas=2, processes=16, gpus=1, device_bytes=30 << 30, host_bytes=9 << 30),
        Pool(role="rollout", replicas=3, gpus=4, workers=2, uncounted=("activations",)),
    ),
    threads=2,
    recipe=RECIPE,
)
OPTIONS = KubernetesOptions(image="reg/cosmos:1", pvc="shared", gpus_per_node=8, namespace="train")

FULL = structure(
    {
        "image": "x",
        "pvc": "p",
        "gpus_per_node": 8,
        "resources": {"rdma/hca": 8},
        "host_network": True,
        "capabilities": ["IPC_LOCK"],
        "annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"},
        "service_account": "trainer",
        "image_pull_secrets": ["registry"],
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "a"},
        ],
        "env": {
            "HF_HOME": "/runs/$(USER)",
            "WFM_REWARD_TOKEN": {"secret": "reward-service", "key": "token"},
            "BUCKET": {"config_map": "s3.common", "key": "bucket"},
        },
        "env_from": [{"secret": "s3"}, {"config_map": "common"}],
    },
    KubernetesOptions,
    "launch.options",
)


def rendered(context=CONTEXT, options=OPTIONS):
    config_map, job_set = yaml.safe_load_all(KubernetesLauncher(options, context).render().text)
    return config_map, job_set


def jobs_of(job_set):
    return {each["name"]: each for each in job_set["spec"]["replicatedJobs"]}


def pod_of(job):
    return job["template"]["spec"]["template"]["spec"]


def test_the_manifest_is_valid(subtests):
    for options in [
        OPTIONS,
        KubernetesOptions(image="x", pvc="p"),
        attrs.evolve(OPTIONS, node_selector={"pool": "h100"}, mount="/r"),
        FULL,
    ]:
        with subtests.test(options=options):
            context = attrs.evolve(CONTEXT, directory=PurePosixPath(options.mount) / "a")
            config_map, job_set = rendered(context, options)
            kubernetes_validate.validate(config_map, "1.31", strict=True)
            jsonschema.validate(job_set, JOBSET)
            for job in job_set["spec"]["replicatedJobs"]:
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
                kubernetes_validate.validate(whole, "1.31", strict=True)


def test_the_validators_find_faults():
    _, job_set = rendered()
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    whole = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x"},
        **job_set["spec"]["replicatedJobs"][0]["template"],
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(whole, "1.31", strict=True)
    job_set["spec"]["sucessPolicy"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job_set, JOBSET)


def test_pods_and_resources_follow_from_the_plan():
    config_map, job_set = rendered()
    assert config_map["data"]["recipe.toml"] == RECIPE
    assert tomllib.loads(config_map["data"]["recipe.toml"])["x"] == "a\tb # \u00e9"
    jobs = jobs_of(job_set)
    assert list(jobs) == ["controller", "policy", "rollout"]
    assert [job["replicas"] for job in jobs.values()] == [1, 2, 3]
    assert [job["template"]["spec"]["completions"] for job in jobs.values()] == [1, 2, 1]
    policy, rollout = pod_of(jobs["policy"])["containers"][0], pod_of(jobs["rollout"])["containers"][0]
    # 9 GiB of the machine's memory, a tenth of it free, and 4 GiB besides, for each of 8 processes.
    assert policy["resources"]["limits"] == {"cpu": "16", "memory": "112Gi", "nvidia.com/gpu": "8"}
    # 4 GiB for each GPU, and a CPU and 1 GiB for each worker.
    assert rollout["resources"]["limits"] == {"cpu": "4", "memory": "18Gi", "nvidia.com/gpu": "4"}
    assert pod_of(jobs["policy"])["volumes"][1]["emptyDir"]["sizeLimit"] == "112Gi"
    assert policy["command"][-4:] == ["/runs/team/Big.Run_7", "policy", "--processes=8", "--gpus=1"]
    assert rollout["command"][-2:] == ["--processes=1", "--gpus=4"]
    assert job_set["metadata"]["namespace"] == config_map["metadata"]["namespace"] == "train"


def test_pools_that_take_turns_have_the_pods_of_the_policy():
    _, job_set = rendered(attrs.evolve(CONTEXT, takes_turns=True))
    jobs = jobs_of(job_set)
    assert {name: job["replicas"] for name, job in jobs.items()} == {"controller": 1, "policy": 2}
    (container,) = pod_of(jobs["policy"])["containers"]
    # What the processes of the policy have, and 18 GiB for each of two rollout replicas.
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "148Gi", "nvidia.com/gpu": "8"}
    assert container["command"][-5:] == ["--processes=8", "--gpus=1", "--pods=2", "--rollouts=2", "--rollout-gpus=4"]


def test_the_run_ends_with_its_controller_and_starts_anew_with_it():
    _, job_set = rendered()
    spec, jobs = job_set["spec"], jobs_of(job_set)
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "big-run-7"}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["controller"]}
    assert spec["failurePolicy"]["maxRestarts"] == 10
    assert pod_of(jobs["controller"])["restartPolicy"] == "Never"
    assert jobs["controller"]["template"]["spec"]["backoffLimit"] == 0
    assert pod_of(jobs["policy"])["restartPolicy"] == "OnFailure"
    for job in jobs.values():
        pod = pod_of(job)
        assert pod["terminationGracePeriodSeconds"] == 120
        assert {"name": "runs", "mountPath": "/runs"} in pod["containers"][0]["volumeMounts"]
        variables = {each["name"]: each for each in pod["containers"][0]["env"]}
        assert "restart-attempt" in variables["COSMOS_JOBSET_ATTEMPT"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_a_run_that_failed_or_was_refused_fails_the_jobset():
    _, job_set = rendered()
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["targetReplicatedJobs"]) == ("FailJobSet", ["controller"])
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    jobs = jobs_of(job_set)
    (of_pod,) = jobs["controller"]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert of_pod["action"] == "FailJob"
    assert of_pod["onExitCodes"] == {"containerName": "cosmos", "operator": "In", "values": [1, 2]}
    assert pod_of(jobs["controller"])["containers"][0]["name"] == "cosmos"
    assert all("podFailurePolicy" not in jobs[role]["template"]["spec"] for role in ("policy", "rollout"))


def test_processes_share_the_cpus_of_a_node_by_gpus():
    _, job_set = rendered(options=attrs.evolve(OPTIONS, cpus_per_node=96))
    given = {role: pod_of(job)["containers"][0]["resources"]["limits"] for role, job in jobs_of(job_set).items()}
    assert (given["policy"]["cpu"], given["rollout"]["cpu"]) == ("96", "48")


def test_pods_of_replicas_reach_infiniband():
    _, job_set = rendered(options=FULL)
    for role, job in jobs_of(job_set).items():
        pod, template = pod_of(job), job["template"]["spec"]["template"]
        (container,) = pod["containers"]
        is_replica = role != "controller"
        assert pod.get("hostNetwork", False) is is_replica
        assert pod.get("dnsPolicy") == ("ClusterFirstWithHostNet" if is_replica else None)
        assert container.get("securityContext") == ({"capabilities": {"add": ["IPC_LOCK"]}} if is_replica else None)
        assert template.get("metadata") == (
            {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"}} if is_replica else None
        )
        assert container["resources"]["limits"].get("rdma/hca") == ("8" if is_replica else None)


def test_without_gpus_a_replica_is_one_pod():
    _, job_set = rendered(options=KubernetesOptions(image="x", pvc="p"))
    jobs = jobs_of(job_set)
    assert jobs["policy"]["template"]["spec"]["completions"] == 1
    assert pod_of(jobs["policy"])["containers"][0]["command"][-2:] == ["--processes=16", "--gpus=0"]
    # On a CPU, the machine's memory holds what GPUs would.
    assert pod_of(jobs["policy"])["containers"][0]["resources"]["limits"] == {"cpu": "32", "memory": "768Gi"}


def test_memory_that_is_given_counts_and_what_the_plan_does_not_count_is_told():
    given = attrs.evolve(OPTIONS, memory_per_process="1.5Gi")
    notes = [
        [note.partition("; ")[2] for note in KubernetesLauncher(options, CONTEXT).render().notes]
        for options in (attrs.evolve(OPTIONS, cpus_per_process=2), attrs.evolve(given, cpus_per_node=16))
    ]
    uncounted = " (the plan does not count activations)"
    assert notes == [
        ["16 CPUs and 112Gi of memory a pod", f"2 CPUs and 18Gi of memory a pod{uncounted}"],
        ["16 CPUs and 12Gi of memory a pod", "8 CPUs and 1.5Gi of memory a pod"],
    ]
    # Who chose threads has chosen CPUs.
    assert len(KubernetesLauncher(OPTIONS, CONTEXT).render().notes) == 2
    *told, hint = KubernetesLauncher(OPTIONS, attrs.evolve(CONTEXT, threads=None)).render().notes
    assert [note.partition("; ")[2][:7] for note in told] == ["8 CPUs ", "3 CPUs "]
    assert "launch.options.cpus_per_node gives each that has GPUs its share" in hint


def test_all_pods_have_the_environment_and_nothing_secret_is_written():
    _, job_set = rendered(options=FULL)
    for job in job_set["spec"]["replicatedJobs"]:
        pod = pod_of(job)
        (container,) = pod["containers"]
        assert [each for each in container["env"] if each["name"] in FULL.env] == [
            # $$ is one $ to Kubernetes, which would put a variable in for $(USER).
            {"name": "HF_HOME", "value": "/runs/$$(USER)"},
            {
                "name": "WFM_REWARD_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "reward-service", "key": "token"}},
            },
            {"name": "BUCKET", "valueFrom": {"configMapKeyRef": {"name": "s3.common", "key": "bucket"}}},
        ]
        assert container["envFrom"] == [{"secretRef": {"name": "s3"}}, {"configMapRef": {"name": "common"}}]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["serviceAccountName"] == "trainer"
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "a"},
        ]
    assert KubernetesLauncher(FULL, CONTEXT).render().variables is None
    assert KubernetesLauncher(attrs.evolve(FULL, env_from=()), CONTEXT).render().variables == frozenset(FULL.env)


def test_what_does_not_fit_is_refused(subtests):
    for context, options, words in [
        ({"directory": PurePosixPath("runs/x")}, {}, "run.output_dir: 'runs' is not on the volume"),
        ({}, {"gpus_per_node": 2}, "rollout.mesh: each process of a rollout replica needs 4 GPUs of one node"),
        (
            {"pools": (Pool(role="policy", replicas=1, gpus=1, needs_gpus=True),)},
            {"gpus_per_node": 0},
            "policy.device: 'cuda', but launch.options.gpus_per_node is 0",
        ),
        ({"name": "a" * 41}, {}, "has more than 40 letters"),
    ]:
        with (
            subtests.test(context=context, options=options, words=words),
            pytest.raises(ConfigError, match=words.replace(".", r"\.")),
        ):
            KubernetesLauncher(attrs.evolve(OPTIONS, **options), attrs.evolve(CONTEXT, **context)).render()


def test_options_that_the_cluster_would_refuse_are_refused(subtests):
    for name, value, words in [
        ("image", "a b", "expected a word without white space, got 'a b'"),
        ("pvc", "Shared", "expected a name of small letters, digits and dashes, got 'Shared'"),
        ("mount", "runs", "expected an absolute path, got 'runs'"),
        ("memory_per_process", "4 GB", "expected a quantity such as 4Gi, got '4 GB'"),
        ("gpu_resource", "gpu", "expected the name of a resource, such as nvidia.com/gpu, got 'gpu'"),
        ("resources", {"hca": 8}, "expected the name of a resource, such as nvidia.com/gpu, got 'hca'"),
        ("capabilities", ["ipc-lock"], "expected a capability such as IPC_LOCK, got 'ipc-lock'"),
        ("annotations", {"a b": "x"}, "expected a key such as nvidia.com/gpu, got 'a b'"),
        ("env", {"A-B": "x"}, "expected names of letters, digits and underscores, got 'A-B'"),
        ("env", {"OMP_NUM_THREADS": "8"}, "got 'OMP_NUM_THREADS', which the launcher sets itself"),
        (
            "env.A.secret",
            {"secret": "S", "key": "k"},
            "expected a name of small letters, digits, dashes and dots, got 'S'",
        ),
        ("env.A.key", {"secret": "s"}, "required, but not given"),
        (
            "env.A.config_map",
            {"secret": "s", "config_map": "c", "key": "k"},
            "expected one of secret and config_map, got both",
        ),
        ("env_from.0.config_map", {}, "expected one of secret and config_map, got neither"),
        ("env_from.0.key", {"secret": "s", "key": "k"}, "unknown option"),
        ("image_pull_secrets", ["A"], "expected a name of small letters"),
        ("service_account", "A B", "expected a name of small letters"),
        ("tolerations.0.key", {"operator": "Exists"}, "required, but not given"),
        ("tolerations.0.operator", {"key": "gpu"}, "required, but not given"),
        (
            "tolerations.0.value",
            {"key": "gpu", "operator": "Equal"},
            "expected a value for 'Equal' and none for 'Exists'",
        ),
    ]:
        option, _, place = name.partition(".")
        given = {"A": {"A": value}, "0": [value]}.get(place[:1], value)
        with (
            subtests.test(name=name, value=value, words=words),
            pytest.raises(ConfigError, match=re.escape(f"launch.options.{name}: {words}")),
        ):
            structure({"image": "x", "pvc": "p", option: given}, KubernetesOptions, "launch.options")
