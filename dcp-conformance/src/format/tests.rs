//! The suite finds formats, readers and writers with a flaw: those of PyTorch's DCP, decorated.

mod flawed;

use std::sync::Arc;

use super::*;
use flawed::{Flaw, FlawedFormat, FlawedWriter};

fn holds(clause: &str, flaw: Flaw) -> Outcome {
    let subject = Subject::with_writer(Arc::new(FlawedFormat(flaw)), move |storage, overwrite| {
        Arc::new(FlawedWriter::new(flaw, storage, overwrite))
    });
    let case = CASES.iter().flat_map(|cases| cases.iter()).find(|case| case.name == clause);
    case.unwrap().check(subject.checksums().index_checksum())
}

/// Each flaw, and the clause that finds it.
const FLAWS: &[(Flaw, &str)] = &[
    (Flaw::RecognizesAnything, "an_empty_folder_is_not_recognized"),
    (Flaw::RecognizesPathsOfTheRoot, "a_checkpoint_is_recognized_by_its_names"),
    (Flaw::CountsAllFiles, "files_of_other_programs_change_nothing"),
    (Flaw::ReadsAgain, "opening_costs_one_listing_and_few_reads"),
    (Flaw::OpensUnread, "a_missing_file_is_noticed_before_data_is_read"),
    (Flaw::OpensUnread, "a_truncated_file_is_noticed_before_data_is_read"),
    (Flaw::FindsProblems, "a_whole_checkpoint_has_no_problem"),
    (Flaw::HidesAnEntry, "the_index_has_what_was_saved"),
    (Flaw::ChangesAByte, "any_box_has_the_right_bytes"),
    (Flaw::SwapsObjects, "objects_come_back"),
    (Flaw::HidesErrors, "a_failing_sink_is_an_error"),
    (Flaw::HidesErrors, "a_failing_storage_is_an_error"),
    (Flaw::KeepsALoan, "any_box_has_the_right_bytes"),
    (Flaw::ComparesNoChecksums, "flipped_bits_of_data_are_found"),
    (Flaw::PanicsOnDamage, "flipped_bits_never_panic"),
    (Flaw::ComparesNoIndex, "flipped_bits_of_the_index_are_found"),
    (Flaw::CutsLongItems, "any_box_has_the_right_bytes"),
    (Flaw::OwnsNothing, "the_index_is_owned"),
    (Flaw::AuditsProblems, "an_audit_of_a_whole_checkpoint_finds_nothing"),
    (Flaw::ForgesChecksums, "a_checksum_is_that_of_the_elements"),
    (Flaw::ComparesNoReads, "every_read_compares_where_the_audit_says_so"),
    (Flaw::ComparesNoRecords, "flipped_bits_of_records_are_found"),
    (Flaw::CountsSaves, "the_same_state_makes_the_same_bytes"),
    (Flaw::CommitsEarly, "nothing_is_visible_before_the_commit"),
    (Flaw::RemovesTheOldIndex, "the_old_checkpoint_stays_until_the_commit"),
    (Flaw::RemovesTheOldIndex, "a_stopped_overwrite_leaves_one_whole_checkpoint"),
    (Flaw::RemovesTheOldIndex, "a_save_on_a_full_storage_keeps_the_old_checkpoint"),
    (Flaw::KeepsStaleFiles, "a_replaced_checkpoint_leaves_no_files"),
    (Flaw::AbandonsNothing, "abandoning_removes_what_was_written_and_nothing_else"),
    (Flaw::AbandonsAll, "abandoning_removes_what_was_written_and_nothing_else"),
    (Flaw::AbandonsNothing, "a_failing_source_fails_the_write"),
    (Flaw::ReplacesAnything, "replacing_needs_permission"),
    (Flaw::RenamesNothing, "names_of_a_generation_are_new"),
    (Flaw::CommitsEarly, "a_stopped_save_is_never_called_whole"),
    (Flaw::LeavesAMarker, "a_save_that_fails_removes_what_it_wrote"),
    (Flaw::AbandonsAfterTheCommit, "a_commit_that_took_effect_is_kept"),
    (Flaw::CommitsUnchecked, "of_overlapping_savers_one_wins"),
    (Flaw::CommitsUnchecked, "a_commit_of_files_that_are_not_whole_fails"),
    (Flaw::ClaimsNothing, "of_overlapping_savers_one_wins"),
    (Flaw::LetsOthersWrite, "a_checkpoint_keeps_others_out"),
    (Flaw::ForgetsCheckpoints, "a_target_knows_its_own_checkpoints"),
    (Flaw::ReplacesWithoutPermission, "a_target_writes_what_the_format_opens"),
];

#[test]
fn a_flaw_of_a_format_is_found_by_its_clause() {
    for &(flaw, clause) in FLAWS {
        let sound = holds(clause, Flaw::None);
        assert!(sound.is_ok(), "{clause} without a flaw: {sound:?}");
        assert!(holds(clause, flaw).is_err(), "{clause} does not find {flaw:?}");
    }
}
