"""Set up the decoding of one sequence: its verifier, drafter, draft length policy and constraint."""

from specdec.draft.acceptance import LOOKUP_ACCEPTANCE, Acceptance
from specdec.draft.draft_length import CostModel, DraftLengthPolicy, FixedLength
from specdec.draft.lookup import LookupDrafter, PredictionDrafter
from specdec.draft.lookup_tables import LookupMemory
from specdec.draft.model_bundle import SequenceCaches
from specdec.draft.settings import SpeculativeSettings
from specdec.engine.autotuner import Autotuner
from specdec.engine.request import GenerationRequest
from specdec.protocols import Drafter, LengthPolicy
from specdec.speculative import DecodingState
from specdec.verification import VERIFIERS


def make_decoding_state(
    autotuner: Autotuner,
    caches: SequenceCaches,
    request: GenerationRequest,
    settings: SpeculativeSettings,
    costs: CostModel | None,
    is_alone: bool,
    memory: LookupMemory,
) -> DecodingState:
    """Return the decoding state of a new sequence, with the verifier, drafter, length policy and constraint that it needs.

    A sequence with a predicted output and the coupled verifier drafts from the prediction. Otherwise it uses the bundle's draft,
    or no draft if the target is too fast for looked-up ones.

    Args:
        autotuner: The autotuner of the models, warmed up.
        caches: The KV caches for this sequence.
        request: A validated request.
        settings: The settings of speculative decoding.
        costs: The cost model of the sequence's batch; None for drafts of fixed length.
        is_alone: Whether the batch is only this sequence.
        memory: What earlier sequences of the same client have left for looked-up drafts.
    """
    bundle = autotuner.bundle
    draft, vocabulary, target, eos_tokens = bundle.draft, bundle.draft.vocabulary, bundle.target, bundle.tokenizer.eos_tokens
    # without a draft only forced tokens are verified, which each verifier accepts
    verify = "coupled" if draft.is_empty else settings.verify
    verifier = VERIFIERS[verify](vocabulary.n_target, request.sampling)
    # with other verifiers the output depends on the draft, so a prediction would change it
    is_predicted = bool(request.prediction) and verify == "coupled"
    if is_predicted:
        drafter: Drafter | None = PredictionDrafter(
            eos_tokens, len(request.prompt), request.prediction, request.sampling, memory, vocabulary.n_target
        )
    elif bundle.uses_lookup and verifier.is_coupled:
        is_too_fast = settings.is_adaptive and autotuner.is_too_fast_for_lookup
        can_branch = bundle.can_lookup_branch(settings) and not (request.constraint or request.sampling.has_logit_adjustments)
        drafter = None if is_too_fast else LookupDrafter(eos_tokens, request.sampling, memory, vocabulary.n_target, can_branch)
    else:
        drafter = bundle.make_drafter(caches, request.sampling, verifier, settings, is_alone, autotuner.draft_calibration)
    policy: LengthPolicy = FixedLength(settings.fixed_gamma)
    if costs and drafter and settings.is_adaptive and drafter.has_variable_length:
        is_free = is_predicted or draft.model is None
        acceptance = autotuner.acceptance if draft.model is None or not is_predicted else Acceptance(LOOKUP_ACCEPTANCE)
        policy = DraftLengthPolicy(costs, acceptance, is_free)
    constraint = request.constraint
    if request.sampling.has_logit_adjustments:
        from specdec.text.logit_processors import ProcessedConstraint

        constraint = ProcessedConstraint(constraint, request.sampling, vocabulary.n_target)
    return DecodingState(
        [*request.prompt],
        request.max_tokens,
        target.n_positions,
        drafter,
        verifier,
        policy,
        eos_tokens,
        constraint,
        target.longrope_threshold,
        request.top_logprobs,
        bundle.n_ids,
        autotuner.step_costs,
    )
