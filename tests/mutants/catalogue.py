"""All bugs to plant, in the order in which they are planted."""

import in_adapters
import in_answers
import in_engine
import in_grammar
import in_kernels
import in_memory
import in_scheduler
import in_server
import in_storage
import in_store
import in_tiers

MUTANTS = [
    *in_memory.MUTANTS,
    *in_scheduler.MUTANTS,
    *in_engine.MUTANTS,
    *in_kernels.MUTANTS,
    *in_grammar.MUTANTS,
    *in_adapters.MUTANTS,
    *in_answers.MUTANTS,
    *in_server.MUTANTS,
    *in_store.MUTANTS,
    *in_storage.MUTANTS,
    *in_tiers.MUTANTS,
]
