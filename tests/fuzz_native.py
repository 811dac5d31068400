"""Any arguments for the binding `tformer_native`: errors are allowed, crashes and wrong answers are not.

`python tests/fuzz_native.py BUNDLE SECONDS [SEED]` calls it at random; the seed that it prints repeats a run. Run it in
a process of its own: tests do, and engines/sanitize with the sanitizers.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tformer_native

Numbers = np.ndarray[Any, np.dtype[Any]]
WHOLE = [*range(-2, 6), 15, 16, 17, 64, 1000, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**31), -(2**63)]
TOKENS = [*range(-1, 15), 100, 2**31 - 1, -(2**31)]
OPTIONS: list[Any] = [
    -1,
    0,
    1,
    2,
    3,
    5,
    0.5,
    1e9,
    2**62,
    True,
    "exact",
    "power",
    None,
    [],
    [1, 2],
    [-1],
    [10**9],
    [[]],
    [[1, 2]],
    [[-1]],
    {},
    "1",
]
SCHEMA = Path(__file__).parent.parent / "tformer_deploy/base/schemas/options.json"
NAMES = (*(each["name"] for each in json.loads(SCHEMA.read_text(encoding="utf-8"))), "x")
ALLOWED = (tformer_native.Error, TypeError, ValueError, OverflowError, ZeroDivisionError)
"""What a mistake may raise: nanobind refuses types, this library everything else, and callbacks divide by zero."""


class Caller:
    """Makes arguments, mostly right ones, and calls."""

    def __init__(self, folder: str, model: Any, seed: int) -> None:
        self.folder, self.model, self.random = folder, model, random.Random(seed)
        self.state, self.rows = None, (0, 0)
        self.batch = model.continuous()
        self.joined: list[Any] = []

    def ids(self, *shape: int) -> Numbers:
        """Token ids, now and then of another shape, type or beyond the vocabulary."""
        draw = self.random
        if draw.random() < 0.05:
            shape = tuple(draw.choice((0, 1, 2, 3, 30)) for _ in range(draw.randrange(4)))
        tokens = TOKENS if draw.random() < 0.05 else range(4, 14)
        made = np.array(draw.choices(tokens, k=int(np.prod(shape))), np.int64).astype(np.int32).reshape(shape)
        return made.astype(np.int64) if draw.random() < 0.02 else made

    def whole(self, *usual: int) -> int:
        return self.random.choice(WHOLE if self.random.random() < 0.15 else usual)

    def lists(self, count: int) -> list[list[int]]:
        draw = self.random
        if draw.random() < 0.1:
            count = draw.randrange(6)
        return [
            draw.choices(TOKENS if draw.random() < 0.1 else range(4, 14), k=draw.randrange(4)) for _ in range(count)
        ]

    def sources(self) -> tuple[Numbers, Numbers]:
        draw = self.random
        count, width = draw.randrange(1, 5), draw.randrange(1, 12)
        lengths = np.array([draw.randint(1, width) for _ in range(count)], np.int32)
        if draw.random() < 0.1:
            lengths = np.array(draw.choices([-1, 0, 1, width + 1, 2**31 - 1], k=draw.randrange(6)), np.int32)
        return self.ids(count, width), lengths

    def encode(self) -> None:
        ids, lengths = self.sources()
        required = self.lists(len(lengths)) if self.random.random() < 0.3 else []
        self.state = None
        self.state = self.model.encode(ids, lengths, self.whole(0, 1, 4), self.whole(0, 8, 20), required)
        self.rows = len(lengths), 1

    def admit(self) -> None:
        ids, lengths = self.sources()
        if self.state is not None:
            self.state.admit(ids, lengths, self.whole(0, 1, 4), self.whole(0, 8), [])
            self.rows = self.rows[0] + len(lengths), self.rows[1]

    def step(self) -> None:
        if self.state is None:
            return
        full, attention = (self.random.random() < 0.3 for _ in range(2))
        ids, scores, every, looked = self.state.step(self.ids(*self.rows), full, attention)
        assert ids.shape == scores.shape and ids.shape[:2] == self.rows and np.isfinite(scores).all()
        assert (every is None) != full and (looked is None) != attention
        assert not len(ids) or (ids.min() >= 0 and (every is None or ids.max() < every.shape[2]))

    def reorder(self) -> None:
        if self.state is None or not self.rows[0]:
            return
        draw, (sentences, beams) = self.random, self.rows
        kept = sorted(draw.sample(range(sentences), draw.randint(1, sentences)))
        width = self.whole(1, 2, 4) if draw.random() < 0.2 else draw.randint(1, 4)
        width = width if 0 <= width < 2000 else 1
        parents = [[draw.randrange(beams) + beams * i for _ in range(width)] for i in kept]
        array = np.array(parents, np.int32).reshape(len(kept), width)
        if draw.random() < 0.1 and array.size:
            array.flat[draw.randrange(array.size)] = draw.choice(TOKENS)
        if draw.random() < 0.05:
            kept = draw.choices(range(-2, 9), k=draw.randrange(5))
        everything = len(kept) == sentences and draw.random() < 0.5
        self.state.reorder(array, None if everything else np.array(kept, np.int32))
        self.rows = len(kept), width

    def look(self) -> None:
        if self.state is None:
            return
        assert self.state.sentences == self.rows[0]
        self.state.cross_keys_values()
        self.state.best(self.whole(1, 2, 4))

    def asked(self) -> tuple[Any, ...]:
        """Sources, numbers, prefixes, options and allowed outputs of a search."""
        draw, (ids, lengths) = self.random, self.sources()
        options: dict[str, Any] = {"max_tokens": 12, "beams": draw.choice((1, 1, 2, 4))}
        if draw.random() < 0.3:
            options = {"max_tokens": 12, **{draw.choice(NAMES): draw.choice(OPTIONS) for _ in range(2)}}
            options["max_tokens"] = 12 if options.get("max_tokens") == 2**62 else options["max_tokens"]
        text = json.dumps(options) if draw.random() < 0.95 else draw.choice(("", "[", "[" * 10_000, "1", "null", "\0"))
        prefixes = self.lists(len(lengths)) if draw.random() < 0.3 else []
        numbers = [self.whole(0, 1, 2) for _ in lengths] if draw.random() < 0.3 else []
        outputs = tformer_native.Outputs(self.lists(3)) if draw.random() < 0.2 else None
        return ids, lengths, numbers, prefixes, text, outputs

    def search(self) -> None:
        draw, asked = self.random, self.asked()
        calls: list[Any] | None = [] if draw.random() < 0.2 else None
        found = self.model.search(*asked, draw.random() < 0.5, calls)
        assert len(found) == len(asked[1])

    def join(self) -> None:
        """Searches join a batch, now and then with a callback that fails or calls the batch, or one that has joined."""
        draw = self.random
        if draw.random() < 0.1:
            self.batch, self.joined = self.model.continuous(), []
        callbacks = [None, lambda _: None, lambda _: self.batch.step(), lambda _: 1 / 0, 5]
        made = []
        for _ in range(draw.randrange(3)):
            on_token = draw.choices(callbacks, (80, 10, 4, 4, 2))[0]
            made.append(tformer_native.Joined(self.batch, *self.asked(), on_token))
        made += draw.sample(self.joined, 1) if self.joined and draw.random() < 0.05 else []
        self.joined += made
        self.batch.add(made)

    def run(self) -> None:
        self.batch.step()

    def leave(self) -> None:
        if self.joined:
            self.batch.remove(self.random.choice(self.joined))

    def outputs(self) -> None:
        """Of a search, over and over; what has ended is let go of now and then."""
        if self.joined:
            search = self.random.choice(self.joined)
            if not search.running and self.random.random() < 0.5:
                self.joined.remove(search)
            assert all(len(best) for best in search.outputs())

    def memory(self) -> None:
        assert np.isfinite(self.model.memory(*self.sources())).all()

    def rate(self) -> None:
        threads = self.whole(1, 2)
        if threads not in range(3, 65):
            tformer_native.product_rate(self.random.choice(("fp32", "int8", "fp64", "")), threads)

    def open(self) -> None:
        draw = self.random
        variant = draw.choice(("native-fp32", "native-int8", "nothing", "", "../x"))
        threads = draw.choice((-(2**31), -5, -1, 0, 1, 2, 1000, 2**31 - 1))
        tformer_native.Model(self.folder, variant, threads, draw.random() < 0.3, draw.choice(("", "portable", "none")))

    def call(self) -> None:
        """One of them, at random. Raises what is not allowed."""
        often: list[Callable[[], None]] = [self.encode, self.admit, self.step, self.step, self.reorder, self.look]
        often += [self.join, self.run, self.run, self.run, self.leave, self.outputs]
        seldom = [self.search, self.memory, self.rate, self.open]
        try:
            self.random.choice(often if self.random.random() < 0.98 else seldom)()
        except ALLOWED:
            return


def together(model: Any) -> None:
    """Four threads and one state: of calls at the same time all but one are refused, and what comes is right."""
    ids, lengths = np.full((2, 6), 5, np.int32), np.array([6, 3], np.int32)
    start, failures = np.full((2, 1), 2, np.int32), list[str]()
    expected = model.encode(ids, lengths, 1, 8, []).step(start, True, False)[2].copy()
    state = model.encode(ids, lengths, 1, 8, [])

    def work(number: int) -> None:
        for i in range(40):
            try:
                if (i + number) % 3 == 0:
                    state.reorder(np.array([[0], [1]], np.int32), None)
                elif (i + number) % 3 == 1:
                    state.cross_keys_values()
                else:
                    state.step(start, True, False)
            except tformer_native.Error as error:
                if "in a call of another thread" not in str(error) and "exceeds the limit" not in str(error):
                    failures.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert np.array_equal(model.encode(ids, lengths, 1, 8, []).step(start, True, False)[2], expected)


def main(folder: str, seconds: float, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    models = [tformer_native.Model(folder, name, 2) for name in ("native-fp32", "native-int8", "native-int4")]
    end, calls = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        model = models[calls % len(models)]
        caller = Caller(folder, model, seed + calls)
        for _ in range(100):
            caller.call()
        if calls % 20 == 0:
            together(model)
        calls += 1
    print(f"{100 * calls} calls")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(2**32))
