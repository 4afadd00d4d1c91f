"""The CUDA stream of a rollout thread, with stand-ins for streams and events: what waits for what."""

import threading
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from gspo.rollout.engines import cuda_streams
from gspo.rollout.engines.cuda_streams import SideStream
from trainers import gap_trainer, steps


class FakeStream:
    def __init__(self, device, calls):
        self.device, self.calls = device, calls

    def wait_event(self, event):
        self.calls.append(("wait", event))

    def record_event(self):
        self.calls.append("record")
        return "event"


def test_work_after_an_event_waits_for_it_and_keeps_what_it_reads(monkeypatch):
    calls = []

    @contextmanager
    def stream(own):
        calls.append("enter")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device, calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(device, calls))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    own = SideStream(torch.device("cuda"))
    tensor = SimpleNamespace(
        is_cuda=True, record_stream=lambda s: calls.append("keep" if s is own.stream else "other")
    )
    context = own.after_queued_work([tensor, torch.zeros(1)])
    assert calls == ["record"]
    with context:
        calls.append("work")
    assert calls == ["record", "enter", ("wait", "event"), "keep", "work", "leave"]


def test_on_a_cpu_there_is_no_stream():
    own = SideStream(torch.device("cpu"))
    with own.after_queued_work([torch.zeros(1)]):
        assert own.stream is None


def test_the_thread_samples_after_the_copies_of_the_weights(monkeypatch):
    calls = []

    class Recording(SideStream):
        def after_queued_work(self, tensors=()):
            calls.append(("queued", threading.current_thread().name.startswith("rollout")))
            return self.entered(len(calls), tensors)

        @contextmanager
        def entered(self, event, tensors):
            calls.append(
                (
                    "after",
                    event,
                    threading.current_thread().name.startswith("rollout"),
                    len(list(tensors)),
                )
            )
            yield

    monkeypatch.setattr(cuda_streams, "SideStream", Recording)
    t = gap_trainer(old="behaviour", staleness=1, overlap=True)
    plain = t.policy.named_tensors

    def named_tensors():
        calls.append("weights")
        return plain()

    monkeypatch.setattr(t.policy, "named_tensors", named_tensors)
    steps(t, 1)
    wait([batch for batch in t.source.batches.values() if isinstance(batch, Future)])
    t.source.close()
    marks = [call for call in calls if call[0] == "queued"]
    assert marks and not any(in_thread for _, in_thread in marks)
    after = [call for call in calls if call[0] == "after"]
    assert len(after) == len(marks) and all(in_thread for _, _, in_thread, _ in after)
    weights = len(dict(plain()))
    assert sorted(count for *_, count in after) == [0, 0, weights]
    with_weights = next(call for call in after if call[3])
    assert with_weights[1] - 1 > calls.index("weights"), (
        "the event is recorded after the copies are queued"
    )
