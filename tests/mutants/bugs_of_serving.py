"""Bugs to plant in what computes and answers: the scheduler, the engine, its kernels, and the server."""

from planted import PlantedBug

BUGS = [
    # The scheduler ends, retracts or answers wrongly.
    PlantedBug(
        "a step that does not fit is planned all the same",
        "Planner.plan",
        "if not fits:\n    batch = _1",
        "if False:\n    batch = _1",
    ),
    PlantedBug(
        "a failed step counts as completed",
        "Scheduler._take_result",
        "self.results.fail(step.rows[live], error)",
        "self.memory.leases.commit(step.rows, step.starts + step.counts, self.running.scheduled[step.rows])",
    ),
    PlantedBug("retraction loses the output", "Lifecycle._leave_row", "tokens.copy()", "request.tokens"),
    PlantedBug(
        "an end inside a verification does not cut the sequence",
        "Results._deliver",
        "running.length[rows[i]] = length[i]",
        "pass",
    ),
    # The engine computes for the wrong tokens, or on the wrong pages.
    PlantedBug(
        "a new sequence keeps the length of the last",
        "Sequences.start",
        "self.length[start.row] = len(start.tokens)",
        "self.length[start.row] = max(len(start.tokens), self.length[start.row])",
    ),
    PlantedBug("a draft model forgets what was cached", "DraftModelSpeculator.start", "start.cached", "0"),
    PlantedBug("a rejected draft stays in a state", "StateBatch.of", "counts - proposed", "counts"),
    PlantedBug(
        "a recorded step reads the pages of another", "Recorder.__call__", "place.record[:] = one.record", "pass"
    ),
    PlantedBug(
        "kernels are found again though a part of them has changed",
        "parts_of",
        "part.exists() and part not in found",
        "part.exists() and part not in found and (len(found) == 1)",
    ),
    PlantedBug(
        "a row keeps the adapter of the sequence before", "AdapterRows.start", "self._of.pop(start.row, None)", "pass"
    ),
    PlantedBug(
        "a retracted row begins its grammar anew", "Matchers.start", "start.tokens[start.prompt_length:].tolist()", "[]"
    ),
    # CPU kernels read or write other numbers.
    PlantedBug(
        "a window layer looks one token too far", "CpuBackend.attention", "attention.window - 1", "attention.window"
    ),
    PlantedBug(
        "a state is left one token late", "_scan_head", "visits.afters[write] == t + 1", "visits.afters[write] == t"
    ),
    PlantedBug(
        "a last key without a neighbour is not seen",
        "TileEmitter.each_key",
        "with builder.if_then(_1):\n    add(builder.sub(keys, one), 0)",
        "pass",
    ),
    PlantedBug(
        "a level that rises leaves the sum of weights as it is",
        "take_block",
        "softmax.weights[row] *= max_lanes(shrink)",
        "pass",
    ),
    PlantedBug("every head looks at the keys of the first", "_starts", "places.head * size", "0"),
    PlantedBug(
        "scales of KV are as far apart as its numbers", "_Tiles.take", "self.step // 4", "self.step // dtype.itemsize"
    ),
    PlantedBug(
        "sums of lower digits carry nothing",
        "_Emitter.joined",
        "builder.add(middle, builder.ashr(low, eight))",
        "middle",
        "amx",
    ),
    # Clients get what belongs to others, or less than they should.
    PlantedBug("what is held back is lost at the end", "Detokenizer.finish", "self._release(len(self.text))", "''"),
    PlantedBug(
        "an engine that is started again has the first weights", "assembled", "assemble(_1, weights=_2)", "assemble(_1)"
    ),
    PlantedBug(
        "a client that leaves is not aborted", "AsyncEngine.stream", "self._child.send_soon(msg.Abort(_1))", "pass"
    ),
    PlantedBug(
        "what one client opened is everybody's", "Client.may_use", "self.is_admin or owner == self.name", "True"
    ),
    PlantedBug(
        "a salt of a key separates nothing",
        "Client.namespace",
        "f'{self.salt}\\x00{asked}' if self.salt or '\\x00' in asked else asked",
        "asked",
    ),
    # Sessions.
    PlantedBug(
        "a turn whose client leaves gives its session on while it is written",
        "Turn.close",
        "self in session.running and not is_saving",
        "self in session.running",
    ),
    PlantedBug(
        "a replacement drops what has begun after it",
        "History.replacing",
        "one.number in replaced and one.number < point.number",
        "one.number in replaced",
    ),
]
