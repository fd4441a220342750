"""Bugs to plant where answers are read, and where what they may say is bound."""

from mutant import Mutant

CUT = "an answer depends on how its text was cut"
LOST = "a part of an answer is lost or made up"
FORM = "output of the wrong form"

SOURCE = "text/answers/source.py"

MUTANTS = [
    Mutant("half a marker is said", CUT, SOURCE, "else len(self.text) - self._undecided(stops)", "else len(self.text)"),
    Mutant(
        "space before half a marker is said",
        CUT,
        SOURCE,
        "            if found or not self.is_complete:\n",
        "            if found:\n",
    ),
    Mutant(
        "an option is decided before all of it is there", CUT, SOURCE, "if self.is_complete or not is_open:", "if True:"
    ),
    Mutant(
        "text that may be read again is dropped",
        CUT,
        SOURCE,
        "        if self.at and not self._held:\n",
        "        if self.at:\n",
    ),
    Mutant(
        "what turned out to be no call is lost",
        LOST,
        SOURCE,
        "                self.content(self.text[begin : self.at])\n",
        "",
    ),
    Mutant("two calls have one id", LOST, SOURCE, "self._call_id(self.calls)", "self._call_id(0)"),
    Mutant(
        "arguments are given to the first call",
        LOST,
        SOURCE,
        "        index = self.calls - 1\n",
        "        index = 0\n",
    ),
    Mutant(
        "tools that nobody offered are called",
        LOST,
        "text/tools/json_call.py",
        "            if name not in tools:\n                raise Broken\n",
        "",
    ),
    Mutant(
        "newlines of a value are lost",
        LOST,
        "text/tools/qwen3_coder.py",
        "    say(newlines[:-1])\n",
        "",
    ),
    Mutant(
        "thoughts that a prompt has closed are waited for",
        LOST,
        "text/answers/thinking.py",
        "(self.is_assumed and not self.is_over(prompt))",
        "self.is_assumed",
    ),
    Mutant(
        "letters are taken for a marker that is a token",
        LOST,
        "text/markers.py",
        "return self._marks.get(marker, marker)",
        "return marker",
    ),
    Mutant(
        "half a character in front of a marker is lost",
        LOST,
        "text/detokenizer.py",
        'self._decoder.decode(b"", final=True) + mark',
        "mark",
    ),
    Mutant(
        "a form binds thoughts, too",
        FORM,
        "text/answers/grammar.py",
        "start: {sequence(before, any_of(ways or [ANYTHING]))}",
        "start: {sequence(any_of(ways or [ANYTHING]))}",
    ),
    Mutant(
        "one call is as good as several",
        FORM,
        "text/tools/hermes.py",
        "if asked.several else",
        "if True else",
    ),
    Mutant(
        "strict tools are called with any object",
        FORM,
        "text/tools/tool.py",
        "        follows = self.is_required or tool.is_strict\n",
        "        follows = self.is_required\n",
    ),
    Mutant(
        "a result that nobody asked for is taken",
        FORM,
        "server/answers/messages.py",
        "name is not None and name not in asked",
        "False",
    ),
    Mutant(
        "a draft model counts what a grammar forced as its own",
        "wrong KV",
        "engine/speculative/draft_model.py",
        "        guessed = np.minimum(work.proposed, self._guessed[rows])\n",
        "        guessed = work.proposed\n",
    ),
    Mutant(
        "guesses are drafted that a grammar forbids",
        "time is wasted",
        "engine/grammar/matchers.py",
        "                    legal[i] = row.matcher.validate_tokens(drafts[i, : counts[i]].tolist())\n",
        "                    pass\n",
    ),
    Mutant(
        "what a grammar forces is not drafted",
        "time is wasted",
        "engine/grammar/matchers.py",
        "                found[i, : len(tokens)], counts[i] = tokens, len(tokens)\n",
        "                pass\n",
    ),
    Mutant(
        "a response goes on behind tokens of another chat",
        "wrong KV",
        "server/sessions/continuation.py",
        "    if not written or at < 0 or not whole.startswith(before):\n",
        "    if not written or not whole.startswith(before):\n",
    ),
    Mutant(
        "a response of another client is gone on from",
        "the server",
        "server/responses/store.py",
        "(?3 IS NULL OR owner = ?3)",
        "(?3 IS NULL OR owner != '')",
    ),
    Mutant(
        "responses are kept without end",
        "the server",
        "server/responses/store.py",
        "            while self._size > BYTES_MAX or",
        "            while False and self._size > BYTES_MAX or False and",
    ),
    Mutant(
        "a named tool is not the only one",
        FORM,
        "server/answers/tools.py",
        "        known = [tool for tool in known if tool.name == name]\n",
        "",
    ),
]
