"""Bugs to plant where output is constrained."""

from mutant import Mutant

FORM = "output of the wrong form"
EXACT = "constrained output depends on how it is computed"
WAITS = "somebody waits for ever"

MATCHERS = "engine/grammar/matchers.py"
COMPILER = "engine/grammar/compiler.py"
SAMPLER = "engine/sampler.py"

MUTANTS = [
    Mutant(
        "a retracted row begins its grammar anew",
        EXACT,
        MATCHERS,
        "start.tokens[start.prompt_length :].tolist()",
        "[]",
    ),
    Mutant(
        "the prompt is taken for output",
        FORM,
        MATCHERS,
        "start.tokens[start.prompt_length :].tolist()",
        "start.tokens.tolist()",
    ),
    Mutant(
        "every draft has the mask of the first",
        EXACT,
        MATCHERS,
        "self.words[first + offset]",
        "self.words[first]",
    ),
    Mutant(
        "a text under a grammar that ignores EOS may end anywhere",
        FORM,
        MATCHERS,
        "        elif row.ignores_eos:\n",
        "        elif False:\n",
    ),
    Mutant(
        "two rows share a matcher",
        EXACT,
        COMPILER,
        "return self.prototype.deep_copy()",
        "return self.prototype",
    ),
    Mutant(
        "rows without a grammar have the mask of one",
        FORM,
        MATCHERS,
        "        return None if first < 0 else self.words[first + offset]",
        "        return self.words[first + offset]",
    ),
    Mutant(
        "a new sequence keeps the grammar of the row before it",
        FORM,
        MATCHERS,
        "        self._rows[start.row] = None\n",
        "",
    ),
    Mutant(
        "min_tokens beats the grammar",
        FORM,
        SAMPLER,
        "        if logits.max() == -np.inf:\n            logits[row.stop_tokens] = before\n",
        "",
    ),
    Mutant(
        "log-probabilities are those behind the mask",
        "log-probabilities",
        SAMPLER,
        "                scored = logits.copy()\n",
        "                pass\n",
    ),
    Mutant(
        "a document that is complete goes on where EOS is ignored",
        FORM,
        "scheduler/results.py",
        " | running.is_bound[rows]",
        "",
    ),
    Mutant(
        "a compiler that hangs holds up those behind it",
        WAITS,
        COMPILER,
        "            if not other.compiled.done():\n                self._submit(other)\n",
        "            pass\n",
    ),
    Mutant(
        "grammars are kept for ever",
        "something grows without end",
        COMPILER,
        "            self._kept.popitem(last=False)",
        "            pass",
    ),
    Mutant(
        "any number of compilers may hang",
        "something grows without end",
        COMPILER,
        "if len(self._abandoned) >= ABANDONED_MAX:",
        "if False:",
    ),
    Mutant(
        "a costly expression shows only while it is followed",
        "starvation or crash under pressure",
        COMPILER,
        "        for one in (matcher, probe):\n",
        "        for one in (matcher,):\n",
    ),
    Mutant(
        "a request that was aborted while its grammar compiled runs",
        WAITS,
        "scheduler/parked.py",
        "        found = self._requests.pop(name, None)\n",
        "        found = None\n",
    ),
    Mutant(
        "a request that waited for its grammar runs without it",
        WAITS,
        "scheduler/parked.py",
        "                request.grammar = compiled.result()\n            if error",
        "                pass\n            if error",
    ),
    Mutant(
        "time stands still while a grammar compiles",
        WAITS,
        "scheduler/parked.py",
        "            if not compiled.done() and not is_late:\n",
        "            if not compiled.done():\n",
    ),
    Mutant(
        "time that was waited for a grammar does not count",
        WAITS,
        "scheduler/lifecycle.py",
        "request.arrival = request.arrival or self.clock()",
        "request.arrival = self.clock()",
    ),
    Mutant(
        "requests that wait for grammars are not counted",
        "starvation or crash under pressure",
        "scheduler/parked.py",
        "        if waiting + len(self._requests) >= self._config.max_queued_requests:\n",
        "        if waiting >= self._config.max_queued_requests:\n",
    ),
    Mutant(
        "a flush does not wait for requests whose grammar compiles",
        WAITS,
        "ipc/procedures.py",
        "scheduler.is_idle and not parked",
        "scheduler.is_idle",
    ),
    Mutant(
        "nobody is told that a grammar is ready",
        WAITS,
        "scheduler/parked.py",
        "        compiled.add_done_callback(lambda _: self._wake())\n",
        "",
    ),
    Mutant(
        "clients choose the options of the grammar",
        FORM,
        "server/constraints/schemas.py",
        "        whole[GUIDANCE] = {",
        "        whole[whole.get(GUIDANCE) and 'x-ours' or GUIDANCE] = {",
    ),
    Mutant(
        "whitespace may go on for ever",
        FORM,
        "server/constraints/schemas.py",
        '{1,8}"',
        '+"',
    ),
    Mutant(
        "a digit of any script is a digit",
        FORM,
        "server/constraints/expressions.py",
        "    chars = _CLASSES.get(char.lower())\n",
        "    chars = None\n",
    ),
    Mutant(
        "of two constraints the first is taken",
        FORM,
        "server/constraints/fields.py",
        "    if others:\n",
        "    if False:\n",
    ),
    Mutant(
        "steps in flight go on with a row whose grammar has failed",
        "wrong KV",
        "engine/runner.py",
        "            self._sequences.end(int(work.rows[i]))\n",
        "            pass\n",
    ),
    Mutant(
        "a failed grammar counts as a sampled token",
        "starvation or crash under pressure",
        "scheduler/results.py",
        "            live = self._refuse(step, result.refused, live)\n",
        "            self._refuse(step, result.refused, live)\n",
    ),
]
