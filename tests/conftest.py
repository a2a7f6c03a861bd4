"""Settings of hypothesis for all tests, and their markers: by folder or file, and `slow` for what is not in QUICK."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No result depends on how busy the machine is.
settings.register_profile(
    "ringtrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ringtrain")

FOLDERS = {"unit": "unit", "ring": "ranks", "cluster": "hosts", "faults": "faults", "spark": "spark"}
LAUNCH = {
    *("test_launch", "test_sweep", "test_compare", "test_tune", "test_bench", "test_benches", "test_peers"),
    *("test_parameter_servers", "test_begin", "test_run"),
}
"""files in ring/ that start `ringtrain launch` or a command that uses it"""

QUICK: dict[str, tuple[str, ...]] = {
    "test_deterministic": ("test_the_same_command_gives_the_same_weights[True]",),
    "test_resume": ("test_a_killed_run_goes_on_bit_for_bit",),
    "test_train": (
        "test_digits_are_learned_and_the_summary_is_complete",
        "test_files_are_where_they_are_promised",
        "test_terminal_shows_the_proof_last_and_no_chatter",
        "test_exported_model_is_plain_keras_with_the_accuracy_it_was_said_to_have",
        "test_one_rank_without_launcher",
        "test_two_ranks_over_gloo_learn_what_one_rank_with_the_big_batch_learns",
        "test_two_ranks_that_accumulate_learn_what_one_rank_with_the_big_batch_learns",
        "test_bad_input_is_one_line_and_exit_code_2",
        "test_bad_input_ends_a_process_of_its_own_alike",
        "test_what_only_one_rank_misses_ends_all_and_names_it",
    ),
    "test_run": ("test_values_of_a_script_without_a_guard", "test_the_end_of_the_calling_process_ends_all_ranks"),
    "test_begin": ("test_what_init_writes_trains_as_it_is_and_is_listed",),
    "test_launch": (
        "test_every_launcher_runs_the_command_as_it_was_typed",
        "test_a_rank_that_leaves_is_named_last_with_its_code_and_words",
        "test_a_killed_rank_is_named_with_its_signal",
        "test_a_killed_launcher_leaves_nothing",
        "test_after_sigterm_ranks_that_do_not_end_are_ended",
    ),
    "test_kills": ("test_a_corrupt_checkpoint_a_bug_an_exit_and_a_full_disk_in_one_run",),
    "test_lab": ("test_hosts_have_names_of_their_own_and_reach_each_other_by_ssh",),
    "test_faults_of_hosts": ("test_hosts_without_a_fault_start_it", "test_nothing_is_left[kill_launcher]"),
    "test_restart_on_hosts": ("test_a_host_that_failed_twice_is_left_out[keep1-2]",),
}
"""tests outside unit/ that `make test` runs: by file; the others are slow"""
QUICK_PROPERTIES = {
    *("agreeing.equal_ranks_have_one_checksum", "agreeing.a_disturbed_weight_is_named"),
    *("agreeing.ranks_fail_together_or_not_at_all", "averaging.sgd_with_momentum_equals_big_batch"),
    *("averaging.without_the_wrapper_they_differ", "batch_norm.training_equals_big_batch"),
    *("precision.only_one_rank_overflows", "precision.deterministic_equals_big_batch"),
}
"""of ring/properties, for each launch"""
QUICK_JOBS = {
    *("arrays_and_metrics", "early_stopping", "own_train_step"),
    *("a_signal_saves_and_ends_all", "resumed_by_other_ranks", "what_differs_is_refused"),
}
"""of ring/run_fit.py, on 2 and on 3 ranks"""
SLOW_FILES = {"test_configured", "test_image_files", "test_models", "test_streams", "test_trackers"}
SLOW_UNIT = {
    "test_checkpoint": ("test_the_exported_model_needs_no_ringtrain",),
    "test_fit_alone": (
        "test_killed_and_resumed_is_as_never_interrupted",
        "test_further_epochs_under_the_same_name",
    ),
    "test_function_call": ("test_tensorflow_says_whether_it_has_used_a_device",),
    "test_hosts": ("test_open_mpi_reads_the_same",),
    "test_imports": ("test_the_collector_skips_the_libraries_and_nothing_else",),
    "test_optimizers": ("test_keras_saves_and_loads_ours", "test_a_compiled_update_differs_in_the_last_bits_alone"),
    "test_sharding": ("test_the_rest_of_an_epoch_is_dealt_once",),
}
"""files and tests of unit/ that `make test` leaves out"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test by where it is."""
    for item in items:
        folder, file = item.path.parent.name, item.path.stem
        item.add_marker("launch" if file in LAUNCH else FOLDERS[folder])
        if "spark" in file and folder != "unit":
            item.add_marker("spark")
        name = getattr(item, "originalname", item.name)
        if name in ("test_property", "test_job"):
            quick = item.callspec.params["name"] in QUICK_PROPERTIES | QUICK_JOBS
        elif folder == "unit":
            quick = file not in SLOW_FILES and name not in SLOW_UNIT.get(file, ())
        else:
            quick = bool({name, item.name} & {*QUICK.get(file, ())})
        if not quick:
            item.add_marker("slow")


def pytest_configure() -> None:
    """Refuses names in the lists above that no test or property has."""
    here = Path(__file__).parent
    listed = [(f"*/{file}.py", name) for file, names in (QUICK | SLOW_UNIT).items() for name in names]
    listed += [(f"ring/properties/{one.split('.')[0]}.py", one.split(".")[1]) for one in QUICK_PROPERTIES]
    listed += [("ring/run_fit.py", name) for name in QUICK_JOBS]
    for pattern, name in listed:
        if not any(f"def {name.partition('[')[0]}(" in path.read_text() for path in here.glob(pattern)):
            raise pytest.UsageError(f"{__file__} names {name}, which is not in {pattern}")
