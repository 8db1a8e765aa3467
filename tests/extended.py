"""Tests that `make test` leaves to `make test-extended`, and the fast tests that stand for each.

A test is in the table if it takes long, or is one of many cases, and a fast test would notice
nearly everything that it would. Where no fast test would, the row names none, and `.ci/run` runs
the extended ones when what they test changes. tests/conftest.py marks what a row names as
``extended``; it refuses a row of a file that names no test, or whose fast tests are gone.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Row(NamedTuple):
    """Extended tests of one file or folder, and what stands for them.

    Attributes:
        tests: how their node ids begin.
        instead: how the node ids of the fast tests begin that stand for them, if any do.
        where: parameters that they have; without any, all tests that begin so.
    """

    tests: str
    instead: tuple[str, ...]
    where: Mapping[str, object] = {}

    def names(self, nodeid, parameters):
        """Say whether a test with these parameters is one of them."""
        return nodeid.startswith(self.tests) and self.where.items() <= parameters.items()


# The compiled implementation runs every scenario. The plain one runs them here, and in `make test`
# wherever the two are compared: engines, sessions and flights without a network, transports over
# real sockets, and every dtype, operation and size through real processes.
PLAIN = {"impl": "plain"}
TWINS = (
    "tests/engine/",
    "tests/transport/",
    "tests/integration/test_bits.py::test_a_second_run_gives_the_same_bits",
)
PLAIN_ROWS = tuple(
    Row(tests, (tests, *TWINS), PLAIN)
    for tests in (
        "tests/faults/",
        "tests/integration/test_failures.py",
        "tests/integration/test_hierarchy.py",
        "tests/integration/test_misuse.py",
        "tests/integration/test_out_of_step.py",
        "tests/integration/test_communicators.py",
        "tests/integration/test_elastic.py",
        "tests/integration/test_join.py",
        "tests/integration/test_topologies.py",
        "tests/integration/test_wire_dtype.py",
        "tests/security/",
        "tests/worker_client/test_collectives.py",
        "tests/worker_client/test_device_errors.py",
        "tests/worker_client/test_fusion.py",
        "tests/worker_client/test_fusion_rounds.py",
        "tests/worker_client/test_named_counts.py",
        "tests/worker_client/test_packing.py",
    )
)


# By file and the fast test that stands for them ("" if none does): the extended tests.
BY_FILE = {
    "tests/integration/test_environments.py": {
        "test_a_job_in[24 files]": (
            "test_a_job_in[64 files, further threads and streams]",
            "test_a_job_in[read-only root]",
            "test_a_job_in[ipv6]",
            "test_a_job_in[Turkish, half a day ahead]",
        ),
        "test_a_job_in[1 GB of address space]": (
            "test_a_reducer_gives_jobs_less_memory_than_its_container_has",
        ),
        "": ("test_a_call_of_3_gib",),
    },
    # -- long searches, and full products of cases
    "tests/engine/test_state_machine.py": {
        "TestTraining": ("TestLongTraining",),
        "TestPlainTraining": ("TestLongPlainTraining",),
    },
    "tests/worker_client/test_flight_twins.py": {
        "TestTwins": ("TestManyTwins",),
    },
    "tests/worker_client/test_driver_signals.py": {
        "test_after_interrupts_at_any_instant": (
            "test_a_signal_handler_may_shut_down_at_any_instant",
        ),
    },
    "tests/worker_client/test_named_counts.py": {
        "": ("test_whatever_fails_where_only_calls_of_one_step",),
    },
    "tests/sim/test_simulator.py": {
        "test_the_guarantee_holds_whatever": ("test_the_guarantee_holds_in_many_more_worlds",),
        "test_a_broken_rule_is_noticed[": tuple(
            f"test_a_broken_rule_is_noticed[{rule}]"
            for rule in (
                *("failures-untold", "no-epoch-check", "questions-not-declined"),
                *("rank-lost-at-once", "window-before-order"),
            )
        ),
    },
    "tests/integration/test_communicators.py": {
        "test_a_late_rank_is_named[compiled-all but elastic]": tuple(
            f"test_a_late_rank_is_named[compiled-{layers}]"
            for layers in ("casting", "elastic, casting", "elastic, fallback", "elastic")
        ),
        "test_an_interrupted_call_is_no_other_ones[compiled-flat]": (
            "test_an_interrupted_call_is_no_other_ones[compiled-fallback]",
            "test_an_interrupted_call_is_no_other_ones[compiled-casting]",
        ),
        "test_an_interrupted_call_is_no_other_ones[compiled-elastic]": (
            "test_an_interrupted_call_is_no_other_ones[compiled-elastic, casting]",
            "test_an_interrupted_call_is_no_other_ones[compiled-elastic, fallback]",
        ),
    },
    "tests/quorum/test_decision.py": {
        "test_all_ranks_have_the_same_outer_steps": ("test_in_many_more_trainings_as_well",),
        "test_a_broken_rule_is_noticed": (
            "test_a_broken_rule_is_noticed[void-attempt-goes-on]",
            "test_a_broken_rule_is_noticed[late-rank-stays]",
        ),
    },
    "tests/integration/test_quorum.py": {
        "test_ranks_and_numpy_have_the_same_bits[2]": (
            "test_ranks_and_numpy_have_the_same_bits[0]",
        ),
        "test_ranks_and_numpy_have_the_same_bits": (
            "test_a_rank_is_stopped_amid_an_averaging",
            "test_a_rank_is_stopped_elsewhere",
            "test_a_rank_dies_and_every_averaging_ends_without_it",
            "test_a_reducer_dies_and_the_bits_are_the_same",
            "test_a_void_attempt_leaves_no_trace",
            "test_one_of_eight_is_stopped_again_and_again",
            "test_the_last_averaging_of_the_others_ends_without_a_rank",
            "test_too_few_ranks",
        ),
    },
    "tests/memberships/test_memberships.py": {
        "test_all_that_are_left_have_the_same_results": (
            "test_in_many_more_trainings_as_well",
            "test_a_broken_rule_is_noticed",
        ),
    },
    "tests/integration/test_bits.py": {
        "test_every_rank_gets_the_oracles_bits_in_the": (
            "test_every_rank_gets_the_oracles_bits_in_all",
        ),
        "test_a_second_run_gives_the_same_bits": (
            "test_a_second_run_of_every_case",
            *(
                f"test_a_second_run_gives_the_same_bits_with_any_kernel_and_either_loop[{kernel}-c"
                for kernel in ("avx2", "generic")
            ),
        ),
    },
    "tests/integration/test_wire_dtype.py": {
        "test_every_rank_has_the_oracles_bits[compiled-bf16]": (
            "test_every_rank_has_the_oracles_bits[compiled-fp16]",
        ),
    },
    "tests/integration/test_wire_ddp.py": {
        "test_ranks_agree_to_the_bit[int8-host-plain]": (
            "test_ranks_agree_to_the_bit[bf16-host-plain]",
            "test_ranks_agree_to_the_bit[fp16-host-plain]",
        ),
    },
    "tests/worker_client/test_flight.py": {
        "test_results_of_a_long_buffer[compiled-1]": (
            "test_results_of_a_long_buffer[compiled-8]",
            "test_results_of_a_long_buffer[plain-0]",
            "test_results_of_a_long_buffer[plain-1]",
        ),
    },
    "tests/worker_client/test_fusion.py": {
        "test_ranks_may_submit_in_any_order[compiled-4-64MiB]": (
            "test_ranks_may_submit_in_any_order[compiled-4-0]",
            "test_ranks_may_submit_in_any_order[compiled-4-8KiB]",
        ),
        "test_a_missing_tensor_is_named_and_fails_at_its_deadline[compiled-others]": (
            "test_a_missing_tensor_is_named_and_fails_at_its_deadline[compiled-nothing]",
        ),
    },
    "tests/worker_client/test_fusion_rounds.py": {
        "test_a_round_that_fails_at_one_rank_alone[compiled-local-ask]": (
            "test_a_round_that_fails_at_one_rank_alone[compiled-local-hear]",
        ),
    },
    "tests/zmtp/test_libzmq.py": {
        "test_a_client_of_libzmq_hears_our_pongs": (
            "test_a_server_of_libzmq_hears_our_pongs[NULL]",
        ),
    },
    # -- ranks and reducers that are lost
    "tests/integration/test_rolling.py": {
        "test_every_reducer_is_killed_and_replaced": (
            "test_a_rolling_restart_costs_no_call",
            "test_rolling_restarts_at_other_paces",
        ),
        "test_a_call_waits_for_a_pool_that_is_gone[1]": (
            "test_a_call_waits_for_a_pool_that_is_gone[2]",
        ),
    },
    "tests/integration/test_elastic.py": {
        "test_the_others_go_on_when_a_rank_dies": (
            "test_a_rank_dies_while_the_others_compute",
            "test_one_rank_after_another_dies",
            "test_the_first_rank_is_like_any_other",
            "test_a_reducer_dies_with_a_rank",
        ),
        "test_the_others_go_on_when_a_rank_dies[compiled-4-2]": (
            "test_the_others_go_on_when_a_rank_dies[compiled-3-1]",
        ),
        "test_a_minority_does_not_go_on": ("test_several_die_at_about_the_same_time",),
    },
    "tests/integration/test_join.py": {
        "test_a_rank_that_is_lost_and_one_that_takes_its_place": (
            "test_four_ranks_become_three_four_six_and_five",
            "test_some_have_gone_on_with_a_newcomer_and_others_not_when_a_rank_is_lost",
            "test_ranks_are_lost_while_others_join",
            "test_many_changes_while_reducers_come_and_go",
            "test_the_example_trains_alike_at_old_ranks_and_new_ones",
        ),
    },
    "tests/integration/test_fallback.py": {
        "test_the_job_goes_on_when_no_reducer_is_left[killed-2-1]": (
            "test_the_job_goes_on_when_no_reducer_is_left[killed-4-3]",
            "test_the_job_goes_on_when_no_reducer_is_left[drained-4-3]",
        ),
        "test_the_job_goes_on_when_no_reducer_is_left[drained-3-2]": (
            "test_the_job_goes_on_when_no_reducer_is_left[killed-3-2]",
            "test_the_job_goes_on_when_no_reducer_is_left[drained-2-1]",
            "test_one_reducer_after_another_is_lost",
        ),
        "test_reducers_that_come_back_are_used_again[2-1]": (
            "test_reducers_that_come_back_are_used_again[3-3]",
            "test_one_reducer_that_comes_back_is_enough",
            "test_reducers_that_come_and_go_at_once_cost_nothing",
        ),
    },
    "tests/integration/test_rank_loss.py": {
        "test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind[4-2]": (
            "test_a_killed_rank_is_named_in_time_and_leaves_nothing_behind[20-4]",
            "test_a_killed_rank_that_hosts_a_reducer",
            "test_torchrun_starts_a_job_again_on_the_same_pool",
        ),
        "test_a_rank_that_stops_for_seconds_is_fenced": (
            "test_a_rank_that_stops_does_not_disturb",
        ),
        "test_a_rank_that_stops_is_waited_for_if_the_job_is_patient[2.0]": (
            "test_a_rank_that_stops_is_waited_for_if_the_job_is_patient[5.0]",
        ),
    },
    # -- whole trainings
    "tests/integration/test_readme.py": {
        "test_the_quick_start_runs_as_shown[forks]": (
            "test_the_quick_start_runs_as_shown[torchrun]",
        ),
    },
    "tests/integration/test_demo.py": {
        "test_ranks_that_differ_are_a_failure": ("test_too_little_training",),
        "test_wrong_options_are_one_sentence[options0": tuple(
            f"test_wrong_options_are_one_sentence[options{at}" for at in (1, 2, 4)
        ),
    },
    "tests/integration/test_ddp.py": {
        "test_three_ranks_in_fp32[0]": ("test_three_ranks_in_fp32[3]",),
    },
    "tests/integration/test_hierarchy_ddp.py": {
        "test_ddp_trains_as_without_hierarchy[2]": (
            "test_ddp_trains_as_without_hierarchy[0]",
            "test_on_one_node_there_is_no_hierarchy",
        ),
    },
    "tests/integration/test_embedded.py": {
        "test_bits_and_leaving_in_any_order[0]": (
            "test_bits_and_leaving_in_any_order[1]",
            "test_bits_and_leaving_in_any_order[2]",
        ),
        "test_a_small_pool_is_helped_by_the_ranks[one]": (
            "test_a_small_pool_is_helped_by_the_ranks[two]",
            "test_a_small_pool_is_helped_by_the_ranks[enough]",
        ),
    },
    "tests/integration/test_gloo_checks.py": {
        "test_the_page_says_what_differs": ("test_every_check",)
    },
    "tests/integration/test_torch_backend.py": {
        "test_through_a_pool": ("test_embedded_and_by_device",),
    },
    "tests/integration/test_horovod.py": {
        "test_errors[3-": ("test_errors[2-",),
        "test_servers_without_a_launcher_are_refused": (
            "test_without_a_launcher_the_job_is_of_one",
        ),
    },
    # -- the page, and what a reducer tells
    "tests/reducer/test_browser.py": {
        "test_it_shows_a_job_and_a_reducer_that_is_lost": (
            "test_a_reducer_that_hangs_is_shown_in_time",
            "test_it_says_that_it_was_never_answered",
            "test_another_reducer_that_is_this_one_is_shown_once",
            "test_text_can_be_read",
        ),
        "test_a_red_square_has_its_sentence_though_its_rank_is_not_named": (
            "test_a_slow_rank_is_named_with_the_reason",
        ),
    },
    # -- the package, links and launchers
    "tests/integration/test_wheel.py": {
        "": (
            "test_a_reducer_runs_from_the_wheel_alone",
            "test_what_is_built_for_others_is_compiled",
            "test_without_a_compiler_the_plain_loops_serve",
            "test_links_of_the_description_lead_into_the_repository",
            "test_the_archive_holds_sources",
        ),
    },
    "tests/integration/test_out_of_step.py": {
        "test_ranks_of_other_settings_learn_it_at_once[compiled-wire_dtype-values0": (
            "test_ranks_of_other_settings_learn_it_at_once[compiled-wire_dtype-values1",
            "test_ranks_of_other_settings_learn_it_at_once[compiled-wire_dtype-values2",
            "test_ranks_of_other_settings_learn_it_at_once[compiled-fusion_threshold",
            "test_ranks_of_other_settings_learn_it_at_once[compiled-servers-values6",
        ),
    },
    "tests/test_ci.py": {
        "test_what_fails_at_once[wrong]": tuple(
            f"test_what_fails_at_once[{case}]"
            for case in (
                "crash",
                "hang",
                "wrong as well",
                "guarantee",
                "stopped",
                "many",
                "skipped",
                "late again",
            )
        ),
    },
    "tests/lab/test_lab.py": {
        "test_a_link_has_its_rate_each_way": ("test_the_payload_rate_is_what_iperf3_reaches",),
    },
    "tests/lab/test_delay.py": {
        "test_a_round_trip_takes_as_long_as_was_asked_for[100]": (
            "test_a_round_trip_takes_as_long_as_was_asked_for[20]",
            "test_a_round_trip_takes_as_long_as_was_asked_for[200]",
            "test_every_host_is_as_far_from_every_other",
            "test_the_links_have_their_rate",
        ),
    },
    "tests/lab/test_faults.py": {
        "test_a_reducer_whose_cable_is_pulled": (
            "test_a_rank_and_a_reducer_that_are_parted",
            "test_a_reducer_at_a_tenth_of_the_rate",
            "test_one_percent_of_packets_lost",
            "test_a_rank_whose_cable_is_pulled",
        ),
    },
    "tests/launch/test_launchers.py": {
        "test_what_is_not_there_is_missed_before_anything_starts[node-run-nosuch-": tuple(
            f"test_what_is_not_there_is_missed_before_anything_starts[{case}-"
            for case in (
                *("node-dry-run-nosuch", "node-dry-run-nosuch.py", "node-run-nosuch.py"),
                *("rank-dry-run-nosuch", "rank-run-nosuch"),
            )
        ),
        "test_a_rank_is_told_who_it_is": (
            "test_torchrun_on_two_nodes",
            "test_srun",
            "test_the_batch_script",
            "test_azure_ml_calls_mpirun",
            "test_mpirun",
        ),
    },
    "tests/launch/test_exit_codes.py": {
        "test_a_command_that_ends_by_itself[launch-2-": (
            *(
                f"test_a_command_that_ends_by_itself[{command}"
                for command in (
                    *("demo", "doctor", "launch --", "timeline"),
                    *("keygen", "plan", "serve", "status", "top"),
                )
            ),
            "test_a_program_that_was_launched_has_its_own",
        ),
        "test_the_doctor_is_ended[2-": (
            "test_the_doctor_is_ended[15-",
            "test_a_reducer_that_is_told_to_stop",
            "test_top_is_ended",
        ),
    },
    "tests/launch/test_terminal.py": {
        "test_the_doctor_says_the_same_words_in_colours_and_without[pipe]": (
            "test_the_doctor_says_the_same_words_in_colours_and_without[no colour]",
        ),
    },
    "tests/launch/test_completion.py": {
        "test_a_shell_has_it_when_it_was_installed[worker-client": (
            "test_a_shell_has_it_when_it_was_installed[reducer",
        ),
    },
    "tests/launch/test_doctor.py": {
        "test_each_illness_is_named": ("test_each_illness_of_keys_is_named",),
        "test_a_slow_link_is_one": ("test_a_link_at_a_tenth_of_the_others_is_named",),
    },
    # -- benchmarks
    "tests/bench/test_allreduce.py": {
        "test_all_reduces_are_compared": (
            "test_predictions_are_compared_with_the_lab",
            "test_scaling",
            "test_soak",
            "test_a_contender_that_fails_is_named_and_the_others_go_on",
            "test_checkouts_side_by_side",
            "test_auto_is_compared_with_what_could_be_set",
            "test_other_contenders",
        ),
    },
    "tests/torture/test_guarantee.py": {
        "test_gradients_of_ddp_and_tensors_are_right": (
            "test_every_result_is_right_or_an_error_in_time",
            "test_every_topology",
        ),
    },
    # -- metrics
    "tests/reducer/test_prometheus.py": {
        "test_every_metric_and_label_is_one_that_a_reducer_tells": (
            "test_every_query_of_the_dashboard_has_an_answer",
            "test_what_the_dashboard_shows_is_so",
            "test_the_alerts_are_evaluated_and_name_the_straggler",
        ),
    },
    "tests/bench/test_ddp.py": {"": ("test_a_tiny_run",)},
}
ROWS = (
    *PLAIN_ROWS,
    Row(
        "tests/kernels/test_golden.py::test_another_cpu",
        ("tests/kernels/test_golden.py::test_a_variant_of_this_cpu",),
    ),
    Row(
        "tests/faults/test_network.py",
        ("tests/faults/test_network.py", "tests/faults/test_streams.py"),
        {"streams": 3},
    ),
    Row("tests/reducer/test_http.py", ("tests/reducer/test_http.py",), {"server": "plain"}),
    Row("tests/reducer/test_many_ranks.py", ("tests/reducer/test_http.py::test_what_a_job_does",)),
    Row("tests/integration/test_pauses.py", ("tests/integration/test_failures.py", "tests/sim/")),
    Row(
        "tests/integration/test_ddp_failover.py",
        ("tests/integration/test_failures.py", "tests/integration/test_ddp.py"),
    ),
    Row("tests/lab/test_elastic.py", ("tests/integration/test_join.py",)),
    Row("tests/bench/test_far.py", ("tests/bench/test_allreduce.py::test_results_say_how_far",)),
    Row(
        "tests/lab/test_sites.py::test_what_cannot_be_is_refused",
        ("tests/bench/test_allreduce.py::test_what_cannot_be_measured_is_said",),
    ),
    *(
        Row(test, ("tests/bench/test_allreduce.py::test_all_reduces_are_compared",))
        for test in (
            "tests/bench/test_micro.py::test_all_but_the_large_ones",
            "tests/bench/test_report.py::test_markdown_has_its_pictures",
        )
    ),
    Row(
        "tests/launch/test_launchers.py::test_a_signal_ends_all_ranks",
        ("tests/integration/test_cli.py::test_a_signal_in_the_middle",),
    ),
    Row(
        "tests/worker_client/test_recording.py::test_a_disk_that_hangs",
        ("tests/worker_client/test_recording.py::test_those_who_wait_in_an_earlier_call",),
    ),
    Row("tests/lab/test_interface.py", ("tests/worker_client/test_interfaces.py",)),
    Row(
        "tests/lab/test_far_jobs.py",
        (
            "tests/transport/test_guard_members.py::test_each_job_is_patient",
            "tests/worker_client/test_flow_control.py::test_lost_packets_hold_up",
        ),
    ),
    Row(
        "tests/lab/test_stragglers.py",
        ("tests/engine/test_lateness.py", "tests/reducer/test_http.py::test_what_the_others_lose"),
    ),
    Row("tests/lab/test_hierarchy.py", ("tests/integration/test_hierarchy_ddp.py",)),
    Row(
        "tests/worker_client/test_recording.py::test_pytorchs_analyzer",
        ("tests/worker_client/test_recording.py::test_calls_by_name_have_the_same_places",),
    ),
    Row(
        "tests/integration/test_wire_dtype.py::test_a_reducer_may_die_between_the_pieces[compiled-int8]",
        ("tests/integration/test_wire_dtype.py::test_a_reducer_may_die_between_the_pieces",),
    ),
    Row(
        "tests/integration/test_wire_dtype.py",
        (
            "tests/integration/test_wire_dtype.py::test_blocks_of_e4m3",
            "tests/kernels/test_block8.py::test_the_bits",
        ),
        {"wire": "fp8_e4m3"},
    ),
    Row(
        "tests/integration/test_wire_ddp.py",
        ("tests/integration/test_wire_ddp.py::test_feedback_is_the_default_in_8_bits_alone",),
        {"compressed": ("fp8_e4m3", "host")},
    ),
    Row(
        "tests/integration/test_wire_ddp.py",
        ("tests/integration/test_wire_ddp.py::test_feedback_is_the_default_in_8_bits_alone",),
        {"compressed": ("bf16", "slow")},
    ),
    Row(
        "tests/integration/test_wire_ddp.py",
        ("tests/integration/test_wire_ddp.py::test_weighted_ranks_agree_to_the_bit",),
        {"unequal": "bf16"},
    ),
    Row(
        "tests/kernels/test_block8.py::test_each_special_case",
        ("tests/kernels/test_block8.py::test_the_bits",),
        {"wire": "fp8_e4m3"},
    ),
    Row("tests/integration/test_timeline.py", ("tests/worker_client/test_timeline.py",)),
    Row("tests/launch/test_vertex.py", ()),
    Row("tests/bench/test_shown_commands.py", ()),
    Row("tests/lab/test_delay.py::test_a_pulled_cable", ()),
    Row(
        "tests/integration/test_staged_ddp.py",
        ("tests/worker_client/test_device_staging.py", "tests/integration/test_ddp.py"),
    ),
    Row(
        "tests/integration/test_horovod.py::test_without_servers_every_rank_hosts",
        ("tests/integration/test_embedded.py", "tests/integration/test_horovod.py::test_training"),
    ),
    *(
        Row(
            f"tests/integration/test_demo.py::test_{name}",
            ("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]",),
        )
        for name in (
            "it_trains_alike_through_reducers_and_through_gloo",
            "the_command_trains_alike",
            "it_can_be_stopped",
            "nobody_outlives_a_killed_demo",
            "a_worker_that_dies_is_named_and_the_others_are_stopped",
        )
    ),
    *(
        Row(
            f"tests/integration/test_horovod.py::test_a_rank_{what}",
            ("tests/integration/test_horovod.py::test_training", "tests/integration/test_join.py"),
        )
        for what in (
            "is_killed_and_one_joins",
            "that_is_stopped_for_longer_than_the_timeout_is_waited_for",
        )
    ),
    Row(
        "tests/lab/test_sites.py::test_two_sites",
        ("tests/integration/test_elastic.py", "tests/worker_client/test_outer.py"),
    ),
    *(
        Row(tests, ("tests/integration/test_readme.py::test_the_quick_start_runs_as_shown[forks]",))
        for tests in (
            "tests/lab/test_tutorial.py",
            "tests/integration/test_pages.py::test_the_tutorial_runs_as_shown",
            "tests/integration/test_pages.py::test_the_three_commands",
        )
    ),
    Row("tests/integration/test_notebook.py::test_the_loss_goes_on", ()),
    Row(
        "tests/integration/test_pages.py::test_a_script_for_horovod_runs_as_shown",
        ("tests/integration/test_horovod.py",),
    ),
    Row(
        "tests/integration/test_pages.py::test_the_backend_trains_as_gloo_does",
        ("tests/integration/test_torch_backend.py",),
    ),
    *(
        Row(f"{file}::{extended}", (f"{file}::{fast}",) if fast else ())
        for file, tests in BY_FILE.items()
        for fast, many in tests.items()
        for extended in many
    ),
)
