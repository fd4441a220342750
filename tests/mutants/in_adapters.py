"""Bugs to plant where adapters and embeddings are computed, and where their KV is found."""

from mutant import Mutant

MIXED = "an adapter computes for others"
FOUND = "KV of another adapter is found"
SCALED = "an adapter is not what was saved"
POOLED = "an embedding lacks tokens or has too many"

MUTANTS = [
    Mutant(
        "prefixes are found without regard to the adapter",
        FOUND,
        "memory/prefix/tree.py",
        "return Namespace(salt, self.weights, adapter)",
        "return Namespace(salt, self.weights)",
    ),
    Mutant(
        "requests look for the model's own KV",
        FOUND,
        "scheduler/admission.py",
        "adapter = fingerprint_of(request.adapter)",
        'adapter = ""',
    ),
    Mutant(
        "stored KV is found without regard to the adapter",
        FOUND,
        "memory/tiers/tiers.py",
        'named = {"salt": namespace.salt, "adapter": namespace.adapter}',
        'named = {"salt": namespace.salt}',
    ),
    Mutant(
        "storage is asked for the model's own KV",
        FOUND,
        "scheduler/loading.py",
        "self._memory.tree.namespace(request.namespace, fingerprint_of(request.adapter))",
        "self._memory.tree.namespace(request.namespace)",
    ),
    Mutant(
        "KV is found by an adapter's name",
        FOUND,
        "engine/adapters.py",
        "self._loaded[name] = Adapter(name, fingerprint, factors)",
        "self._loaded[name] = Adapter(name, name, factors)",
    ),
    Mutant(
        "a row keeps the adapter of the sequence before",
        MIXED,
        "engine/adapters.py",
        "            self._of.pop(start.row, None)\n",
        "            pass\n",
    ),
    Mutant(
        "tokens of an adapter are counted from the wrong end",
        MIXED,
        "engine/adapters.py",
        "np.arange(ends[i] - sizes[i], ends[i])",
        "np.arange(ends[i] - sizes[i], ends[i] - 1) if sizes[i] > 1 else np.arange(ends[i] - 1, ends[i])",
    ),
    Mutant(
        "only the first adapter of a step computes",
        MIXED,
        "engine/cpu/low_rank.py",
        "in self.tokens.parts:",
        "in self.tokens.parts[:1]:",
    ),
    Mutant(
        "an adapter's second matrix stands where the first does",
        SCALED,
        "engine/cpu/low_rank.py",
        "            first += rows\n",
        "",
    ),
    Mutant(
        "ranks of two matrices overlap",
        SCALED,
        "engine/cpu/low_rank.py",
        "                at = end\n",
        "",
    ),
    Mutant(
        "rank-stabilized adapters are scaled like others",
        SCALED,
        "models/loading/adapter_file.py",
        'rank**0.5 if config.get("use_rslora") else rank',
        "rank",
    ),
    Mutant(
        "a module's own alpha is ignored",
        SCALED,
        "models/loading/adapter_file.py",
        'next(fits, config.get("lora_alpha", 8))',
        'config.get("lora_alpha", 8)',
    ),
    Mutant(
        "an adapter with more than LoRA is taken for one",
        SCALED,
        "models/loading/adapter_file.py",
        "        if config.get(field, allowed[0]) not in allowed:\n",
        "        if False:\n",
    ),
    Mutant(
        "an adapter of another shape is taken",
        SCALED,
        "engine/adapters.py",
        "            if (len(pair.up), pair.down.shape[1]) != shape:\n",
        "            if False:\n",
    ),
    Mutant(
        "modules that the model lacks are skipped",
        SCALED,
        "engine/adapters.py",
        '                raise InvalidParameter("lora_path", f"{path}: {module} of this model can\'t be adapted")\n',
        "                continue\n",
    ),
    Mutant(
        "requests forget their adapter on the way",
        MIXED,
        "scheduler/lifecycle.py",
        "                adapter=request.adapter,\n",
        "",
    ),
    Mutant(
        "an engine that is started again lacks its adapters",
        MIXED,
        "ipc/engine_setup.py",
        '{**self.config.adapter_paths, argument["name"]: argument["path"]}',
        '{argument["name"]: argument["path"]}',
    ),
    Mutant(
        "an adapter that was named apart is ignored",
        MIXED,
        "server/served_models.py",
        "return Chosen(chosen.name, lora_path)",
        "return chosen",
    ),
    Mutant(
        "the mean takes cached tokens for pooled",
        POOLED,
        "scheduler/request.py",
        "return min(self.scored_from, self.pooled_from)",
        "return self.scored_from",
    ),
    Mutant(
        "tokens are pooled twice after a retraction",
        POOLED,
        "engine/sequences.py",
        "return max(start, int(self.pooled_from[row])), min(end, int(self.prompt_length[row]))",
        "return start, min(end, int(self.prompt_length[row]))",
    ),
    Mutant(
        "output is pooled too",
        POOLED,
        "engine/sequences.py",
        "min(end, int(self.prompt_length[row]))\n\n    def scored",
        "end\n\n    def scored",
    ),
    Mutant(
        "pooled states are not normed",
        POOLED,
        "engine/runner.py",
        "states = self._model.final(hidden[offset + first : offset + end])",
        "states = hidden[offset + first : offset + end]",
    ),
    Mutant(
        "states are given to the neighbour",
        POOLED,
        "step.py",
        "pooled = {i: self.pooled[at] for i, at in enumerate(live.tolist()) if at in self.pooled}",
        "pooled = self.pooled",
    ),
]
