import subprocess
import sys
import textwrap


def test_a_group_that_was_given_up_lets_its_process_end():
    program = """
        import threading
        import torch
        from cosmos_core.policy.processes.group import GradientGroupError
        from cosmos_core.policy.processes.rendezvous import form_group
        from cosmos_core.policy.processes.rendezvous import GroupStore

        store = GroupStore("127.0.0.1")
        pointless = threading.Event()

        def member(rank):
            return form_group(
                generation=1, rank=rank, size=2, store=store.endpoint, address="127.0.0.1",
                device=torch.device("cpu"), interrupted=pointless.is_set, timeout_s=10.0,
            )

        silent = []
        other = threading.Thread(target=lambda: silent.append(member(1)))
        other.start()
        group = member(0)
        other.join()
        threading.Timer(0.2, pointless.set).start()
        try:
            group.sum(torch.ones(1))
        except GradientGroupError as error:
            print(error)
    """
    ended = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "generation 1: interrupted in a collective\n"
