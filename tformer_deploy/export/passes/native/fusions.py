"""Instructions fused into the product, norm or attention before them. Each reads values that are written before it."""

from __future__ import annotations

from dataclasses import replace

from .instructions import Instruction, Program, View

VIEWED = ("self", "cross", "recur")
"""Instructions that read some columns of a value as well as all, and for which layers stay merged. No norm: what it
writes would be narrower than the rest, and a step's attention reads q, k and v from values of one width."""
MOVED = ("keep", "norm")
"""Instructions that follow the product that they read at once, so that the next layer's product takes its memory."""


def fuse(program: Program) -> None:
    """All fusions, in place; values are numbered anew."""
    _drop_unread(program)
    _split_products(program)
    _fuse_activations(program)
    _fuse_pairs(program, "multiply", "gate")
    _fuse_pairs(program, "add", "residual")
    _fuse_rounding(program)
    _renumber(program)


def _readers(program: Program, value: int) -> list[Instruction]:
    return [each for each in program.code if any(view.value == value for view in each.reads.values())]


def _writer(program: Program, value: int) -> Instruction:
    return next(each for each in program.code if value in (each.out, each.rounded))


def _only(program: Program, view: View, by: Instruction) -> Instruction | None:
    """The product that makes a value, all of which one instruction reads and no other."""
    made = _writer(program, view.value)
    whole = view == View(view.value, 0, program.widths[view.value])
    return made if made.op == "matmul" and whole and _readers(program, view.value) == [by] else None


def _drop_unread(program: Program) -> None:
    """What was looked up for a sum that is something else."""
    for each in reversed(list(program.code)):
        written = [value for value in (each.out, each.rounded) if value is not None]
        if written and not any(_readers(program, value) for value in written):
            program.code.remove(each)


def _split_products(program: Program) -> None:
    """Of layers that were merged, but whose parts do not go to attention, one product each."""
    for made in [each for each in program.code if each.op == "matmul" and each.out is not None]:
        width, readers = program.widths[made.out or 0], _readers(program, made.out or 0)
        views = {view for each in readers for view in each.reads.values() if view.value == made.out}
        if views == {View(made.out or 0, 0, width)} or all(each.op in VIEWED for each in readers):
            continue
        place, parts = program.code.index(made), {}
        program.code.remove(made)
        for view in sorted(views, key=lambda each: each.first):
            assert made.matrix is not None
            program.widths.append(view.width)
            out = len(program.widths) - 1
            parts[view] = View(out, 0, view.width)
            arrays = {role: each.part(view.first, view.width) for role, each in made.arrays.items()}
            matrix = made.matrix.part(view.first, view.width)
            program.code.insert(place, replace(made, out=out, matrix=matrix, arrays=arrays, reads=dict(made.reads)))
            place += 1
        for each in readers:
            each.reads = {role: parts.get(view, view) for role, view in each.reads.items()}
            if each.op in MOVED:
                program.code.remove(each)
                last = max(program.code.index(_writer(program, view.value)) for view in each.reads.values())
                program.code.insert(last + 1, each)


def _fuse_activations(program: Program) -> None:
    for each in [each for each in program.code if each.op == "activate"]:
        made = _only(program, each.reads["x"], each)
        if made is not None and "activation" not in made.how:
            made.out, made.how = each.out, {**made.how, **each.how}
            program.code.remove(each)


def _fuse_pairs(program: Program, op: str, role: str) -> None:
    """A product's result and what it is multiplied with or added to."""
    for each in [each for each in program.code if each.op == op]:
        for one, other in (("y", "x"), ("x", "y")):
            made = _only(program, each.reads[one], each)
            if made is None or "residual" in made.reads or role in made.reads:
                continue
            before = program.code[: program.code.index(made)]
            if not any(each.reads[other].value in (it.out, it.rounded) for it in before):
                continue
            made.out, made.reads = each.out, {**made.reads, role: each.reads[other]}
            program.code.remove(each)
            break


def _fuse_rounding(program: Program) -> None:
    """What writes a value rounds it as well, or instead."""
    for each in [each for each in program.code if each.op == "round"]:
        view = each.reads["x"]
        made = _writer(program, view.value)
        if made.rounded is not None or view.width != program.widths[view.value] or made.op in ("embed", "recur"):
            continue
        alone = _readers(program, view.value) == [each]
        if not alone and made.op != "norm":
            continue
        made.rounded, made.rounding = each.rounded, each.rounding
        made.out = None if alone else made.out
        program.code.remove(each)


def _renumber(program: Program) -> None:
    """Only values that are written, in order."""
    written = [value for each in program.code for value in (each.out, each.rounded) if value is not None]
    new = {value: number for number, value in enumerate(written)}
    for each in program.code:
        each.out = None if each.out is None else new[each.out]
        each.rounded = None if each.rounded is None else new[each.rounded]
        each.reads = {role: replace(view, value=new[view.value]) for role, view in each.reads.items()}
    program.widths = [program.widths[value] for value in written]
