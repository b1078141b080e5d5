"""Expensive test functions, of which `make test` runs a sample.

`Sample(cases that stay, processor seconds of all cases)`. The functions that take more than two seconds are listed,
and keep about one second, or more where they are the main test of an invariant. 0 cases need a reason.
"""

from tests.support.selection import Sample

TRAINED = "trains by the README's commands, shortened; the tests of training and export cover each step"
SMALL_ZOO = "builds the whole zoo in small; other tests of the file cover its parts"
ASSETS = "compresses all assets, which change with a release"
RAY = "starts Ray and three models; tests/replicas kills replicas in one process"
SECOND_RUN = "repeats the command of the test before it through a worker; tests/bench covers the loop"
QUALITY = "measures the loss of quality on the built-in model; other tests of the file cover the arithmetic"

BY_FILE = {
    "tests/attacks/test_mixes.py": {
        "test_a_mix_is_plain_decoding": Sample(9, 33),
    },
    "tests/bench/test_documents.py": {
        "test_every_kind_has_as_many_prompts_as_a_benchmark_takes": Sample(2, 7),
    },
    "tests/bench/test_grow.py": {
        "test_the_logits_stay": Sample(4, 1),
    },
    "tests/bench/test_load_loop.py": {
        "test_rounds_that_would_end_too_late_are_not_begun": Sample(2, 9),
    },
    "tests/bench/test_workloads.py": {
        "test_every_workload_gives_different_prompts_the_same_each_time": Sample(1, 10),
    },
    "tests/certify/test_mutants.py": {
        "test_a_fault_of_independent_samples_fails": Sample(1, 169),
        "test_a_fault_of_token_verification_fails": Sample(4, 48),
        "test_a_race_that_is_not_exponential_fails": Sample(1, 9),
        "test_the_adapted_programs_without_a_fault_pass": Sample(1, 18),
        "test_the_real_system_passes": Sample(1, 49),
        "test_wrong_random_numbers_fail": Sample(2, 45),
    },
    "tests/cli/test_batch.py": {
        "test_a_job_killed_again_and_again_writes_the_file_of_an_undisturbed_one": Sample(1, 87),
    },
    "tests/cli/test_bench_load.py": {
        "test_through_a_worker": Sample(0, 13, SECOND_RUN),
    },
    "tests/draft_length/test_adaptive.py": {
        "test_more_requests_are_never_slower_than_plain": Sample(2, 15),
        "test_nothing_makes_it_slower_than_plain": Sample(3, 7),
        "test_one_request_is_never_slower_than_plain_and_near_the_best_length": Sample(2, 19),
    },
    "tests/drafters/aggressive/test_predicted_outputs.py": {
        "test_predictions_change_the_passes_and_not_the_text": Sample(2, 7),
    },
    "tests/drafters/common/test_mismatch_methods.py": {
        "test_a_stranger_in_a_merged_tree_is_named_once": Sample(4, 21),
        "test_a_stranger_is_named_although_the_ensemble_hardly_chooses_it": Sample(1, 11),
        "test_a_stranger_is_named_although_the_policy_stops_its_drafts": Sample(1, 22),
        "test_a_stranger_is_named_once": Sample(6, 15),
    },
    "tests/drafters/draft_model/test_vocab_drafting.py": {
        "test_a_text_of_its_own_after_another_in_the_same_slot": Sample(1, 11),
        "test_texts_of_all_kinds_are_those_without_a_draft": Sample(2, 4),
    },
    "tests/drafters/early_exit/test_early_exit.py": {
        "test_the_targets_memory_equals_a_recomputation_after_every_step": Sample(2, 16),
    },
    "tests/drafters/ensemble/test_fallback.py": {
        "test_text_is_the_same_under_a_fallback_of_any_method": Sample(3, 34),
        "test_the_distribution_of_reject_holds_with_and_without_a_prediction": Sample(1, 8),
    },
    "tests/drafters/medusa/test_medusa.py": {
        "test_drawn_trees_leave_the_distribution_of_the_target": Sample(1, 27),
    },
    "tests/drafters/ngram_lm/test_ngram_lm.py": {
        "test_drawn_tokens_follow_the_reported_q": Sample(1, 10),
    },
    "tests/drafters/test_missed_steps.py": {
        "test_a_pass_that_fails_while_a_draft_grows_changes_no_text": Sample(3, 11),
        "test_a_text_whose_step_was_missed_is_drafted_for_no_more_or_from_true_states": Sample(3, 4),
        "test_one_failed_call_changes_no_text": Sample(10, 20),
    },
    "tests/engine/test_interrupts.py": {
        "test_an_interrupt_at_any_line_of_a_step_changes_no_text_of_others": Sample(2, 8),
    },
    "tests/engine/test_soak.py": {
        "test_sixty_requests_in_a_pool_too_small": Sample(1, 19),
    },
    "tests/engine/test_termination.py": {
        "test_texts_end_where_the_oracle_ends_them": Sample(1, 20),
    },
    "tests/engine/test_worker_faults.py": {
        "test_a_fault_at_any_stage_of_a_step_changes_no_text": Sample(2, 25),
        "test_faults_of_the_target_at_random_steps_change_no_text": Sample(2, 5),
    },
    "tests/invariants/test_bits.py": {
        "test_every_bit_is_that_of_plain_decoding": Sample(10, 123),
        "test_greedy_decoding_has_the_same_bits_under_every_lossless_rule": Sample(19, 14),
        "test_on_every_instruction_set_and_two_threads": Sample(2, 29),
        "test_preemption_and_chunked_prompts_change_no_bit": Sample(2, 48),
    },
    "tests/invariants/test_cross_vocab.py": {
        "test_texts_have_the_distribution_of_the_target": Sample(2, 14),
        "test_the_distribution_kills_a_q_that_was_not_drawn_from": Sample(1, 19),
    },
    "tests/invariants/test_devices.py": {
        "test_tokens_on_a_gpu_are_those_of_the_cpu": Sample(3, 90),
    },
    "tests/invariants/test_draft_streams.py": {
        "test_a_sampled_draft_depends_on_the_stream": Sample(12, 14),
    },
    "tests/invariants/test_engine.py": {
        "test_texts_have_the_distribution_of_the_target": Sample(2, 85),
    },
    "tests/invariants/test_exact_distribution.py": {
        "test_a_step_keeps_the_joint_distribution_of_three_tokens": Sample(28, 24),
        "test_match_writes_the_plain_text_of_the_seed_whatever_the_draft": Sample(30, 5),
        "test_texts_drawn_with_the_real_noise_follow_the_target": Sample(3, 13),
    },
    "tests/invariants/test_freed_state.py": {
        "test_nothing_of_a_request_is_kept": Sample(5, 28),
        "test_nothing_of_a_request_with_a_source_is_kept": Sample(2, 3),
    },
    "tests/invariants/test_grammar.py": {
        "test_a_step_has_the_distribution_of_the_target_under_the_grammar": Sample(2, 7),
        "test_drafts_that_do_not_keep_to_it_cost_speed_alone": Sample(2, 6),
        "test_the_distribution_kills_masks_of_another_position": Sample(2, 8),
    },
    "tests/invariants/test_images.py": {
        "test_every_bit_is_that_of_plain_decoding": Sample(10, 123),
    },
    "tests/invariants/test_kv.py": {
        "test_kv_equals_a_recomputation_after_every_step": Sample(1, 25),
        "test_the_memory_of_heads_equals_a_recomputation_after_every_step": Sample(1, 27),
    },
    "tests/invariants/test_lossless.py": {
        "test_a_mixed_batch_leaks_nothing_between_its_requests": Sample(2, 12),
        "test_greedy_text_is_the_same_under_every_lossless_rule": Sample(2, 54),
        "test_preemption_and_chunked_prompts_change_no_text": Sample(2, 65),
        "test_samples_and_seeds_do_not_depend_on_a_drafter": Sample(2, 9),
        "test_text_is_the_same_with_and_without_a_drafter": Sample(11, 126),
    },
    "tests/invariants/test_merged_independent_samples.py": {
        "test_merges_with_independent_samples_keep_the_joint_distribution": Sample(5, 14),
    },
    "tests/invariants/test_mutants.py": {
        "test_the_distribution_of_a_step_kills_a_fault_of_token_verification": Sample(6, 4),
        "test_the_distribution_of_a_step_kills_a_wrong_distribution_at_any_position": Sample(8, 12),
        "test_whole_texts_kill_uniforms_that_are_shared_or_used_twice": Sample(2, 5),
    },
    "tests/invariants/test_prefix_cache.py": {
        "test_memory_is_counted_for_target_and_drafter_together": Sample(4, 7),
        "test_pages_without_draft_memory_are_found_and_drafted_for_all_the_same": Sample(2, 5),
        "test_texts_after_hits_are_those_without": Sample(2, 51),
    },
    "tests/invariants/test_seq2seq.py": {
        "test_text_does_not_depend_on_the_draft": Sample(3, 23),
        "test_texts_have_the_distribution_of_the_target": Sample(2, 72),
        "test_the_count_kills_faults_of_verification": Sample(1, 40),
    },
    "tests/invariants/test_tree_builder.py": {
        "test_a_step_has_the_distribution_of_the_target": Sample(2, 26),
        "test_the_distribution_of_a_step_kills_drafts_that_are_not_what_was_drawn": Sample(2, 6),
    },
    "tests/kernels/test_native_attention.py": {
        "test_bits_do_not_depend_on_the_sums_that_a_compiler_fuses": Sample(1, 11),
        "test_right_to_the_rounding_of_the_arithmetic": Sample(5, 11),
    },
    "tests/models/images/test_image_families.py": {
        "test_a_request_in_a_mixed_batch_is_as_alone": Sample(8, 11),
        "test_drafts_change_no_token": Sample(13, 48),
        "test_images_are_decoded_as_transformers_does": Sample(13, 12),
    },
    "tests/models/test_encdec.py": {
        "test_greedy_text_is_that_of_transformers": Sample(5, 5),
    },
    "tests/models/test_families.py": {
        "test_every_path_of_a_tree_and_what_follows_the_accepted_one": Sample(20, 3),
    },
    "tests/models/test_family_walk.py": {
        "test_a_family_has_the_outcome_on_the_page": Sample(12, 60),
    },
    "tests/models/test_native_decoder.py": {
        "test_on_every_instruction_set_and_every_team": Sample(4, 132),
    },
    "tests/models/test_native_draft_layers.py": {
        "test_on_every_instruction_set_and_every_team": Sample(9, 4),
    },
    "tests/models/test_packed_linear.py": {
        "test_what_quantisation_costs_in_quality": Sample(0, 5, QUALITY),
    },
    "tests/ray_serve/test_kill.py": {
        "test_a_killed_replica_breaks_its_own_streams_alone": Sample(0, 100, RAY),
    },
    "tests/reproduce/test_claims.py": {
        "test_a_given_pair_is_measured_instead_of_the_built_in_one": Sample(2, 18),
        "test_a_quick_run_writes_what_it_measured": Sample(3, 40),
    },
    "tests/reproduce/test_workbench.py": {
        "test_a_drafter_drafts_the_same_beside_the_grown_target": Sample(2, 6),
    },
    "tests/sampling/test_grammar.py": {
        "test_text_is_the_same_with_and_without_a_drafter": Sample(6, 91),
    },
    "tests/sampling/test_rng.py": {
        "test_the_top_k_of_a_race_are_draws_without_replacement_in_order": Sample(2, 3),
    },
    "tests/server/test_chat.py": {
        "test_text_that_spells_a_control_token_stays_text": Sample(12, 3),
    },
    "tests/server/test_completions.py": {
        "test_a_stream_is_the_plain_answer_in_pieces": Sample(3, 3),
    },
    "tests/server/test_fields.py": {
        "test_a_field_changes_the_answer": Sample(2, 8),
        "test_a_value_that_cannot_be_is_a_400_with_its_field": Sample(27, 2),
        "test_neutral_values_are_taken_and_all_others_named": Sample(1, 11),
    },
    "tests/server/test_lifecycle.py": {
        "test_what_does_not_end_in_time_is_aborted": Sample(1, 22),
    },
    "tests/server/test_methods_served.py": {
        "test_answers_are_those_of_plain_decoding": Sample(1, 9),
    },
    "tests/server/test_playground.py": {
        "test_the_server_streams_to_the_page_and_plain_decoding_says_the_same": Sample(1, 11),
    },
    "tests/server/test_schemathesis.py": {
        "test_answers_are_as_documented": Sample(2, 6),
    },
    "tests/tensor_parallel/test_loss.py": {
        "test_the_processes_end_with_their_program": Sample(1, 27),
    },
    "tests/tensor_parallel/test_methods.py": {
        "test_preemption_chunks_and_shared_prefixes_change_no_text": Sample(1, 11),
        "test_texts_of_two_processes_are_those_of_one": Sample(8, 101),
    },
    "tests/test_llm_lifetime.py": {
        "test_a_forked_process_is_refused_at_once_and_a_spawned_one_works": Sample(1, 7),
        "test_an_llm_is_freed_with_its_last_reference": Sample(2, 5),
    },
    "tests/test_packaging.py": {
        "test_the_wheel_has_room_for_more_models": Sample(0, 10, ASSETS),
    },
    "tests/test_readme.py": {
        "test_a_drafter_is_trained_compared_and_exported": Sample(0, 37, TRAINED),
        "test_a_snippet_of_python_runs": Sample(1, 21),
        "test_the_commands_of_a_block_run": Sample(1, 40),
    },
    "tests/train/remote/test_runs.py": {
        "test_the_weights_and_figures_are_those_of_a_local_target": Sample(3, 13),
    },
    "tests/train/test_chimera.py": {
        "test_it_learns_under_every_loss": Sample(2, 9),
    },
    "tests/train/test_heads.py": {
        "test_heads_learn_under_every_loss_and_draft": Sample(2, 9),
    },
    "tests/train/test_methods.py": {
        "test_a_draft_learns_under_every_loss": Sample(2, 4),
    },
    "tests/train/test_replay.py": {
        "test_a_replay_counts_what_a_real_run_counts": Sample(6, 35),
    },
    "tests/train/test_seq2seq_runs.py": {
        "test_a_trained_drafter_drafts_and_leaves_the_text": Sample(4, 21),
    },
    "tests/verification/test_block_chain.py": {
        "test_a_chain_may_end_after_any_token_that_it_keeps": Sample(4, 24),
    },
    "tests/verification/test_rules.py": {
        "test_worlds_of_trees_keep_the_distribution_of_siblings_drawn_without_replacement": Sample(2, 22),
    },
    "tests/verification/test_spectr.py": {
        "test_a_step_with_independent_samples_keeps_the_joint_distribution_of_three_tokens": Sample(10, 35),
    },
    "tests/zoo/test_train.py": {
        "test_everything_is_built_and_measured_and_loads_in_transformers": Sample(0, 40, SMALL_ZOO),
    },
}
SAMPLES = {f"{file}::{name}": sample for file, samples in BY_FILE.items() for name, sample in samples.items()}
