//! What is found wrong with a checkpoint.

use std::sync::Arc;

use dcp_core::Storage;
use dcp_jobs::JobOptions;
use dcp_jobs::verify::VerifyReport;
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, verify};

use crate::support::{block_on, get, put, remove, stored};

fn report(storage: &Arc<dyn Storage>, deep: bool) -> VerifyReport {
    block_on(verify(storage, deep, &JobOptions::default())).unwrap()
}

fn messages(report: &VerifyReport) -> Vec<String> {
    report.problems.iter().map(|problem| problem.message.clone()).collect()
}

#[test]
fn whole_checkpoints_have_no_problems() {
    for (name, format) in [
        ("tp2_basic", "torch_dist"),
        ("v015_flattened", "torch_dist"),
        ("head020_basic_integrity", "torch_dist"),
        ("run_torch_dist_dp2", "torch_dist"),
        ("gpt_moe_ep2_swiglu", "torch_dist"),
        ("v06_zarr", "zarr"),
        ("v09_zarr", "zarr"),
        ("run_legacy_torch_tp2", "torch"),
    ] {
        for deep in [false, true] {
            let report = report(&stored(name), deep);
            assert_eq!(messages(&report), [""; 0], "{name}");
            assert!(report.ok && report.format == format && report.deep == deep, "{name}");
            assert!(!deep || report.bytes_checked > 0 || format == "zarr", "{name}");
        }
    }
}

#[test]
fn a_common_state_that_is_gone_is_a_problem_among_others() {
    let storage = stored("tp2_basic");
    remove(&*storage, "common.pt");
    remove(&*storage, "__1_1.distcp");
    let report = report(&storage, false);
    assert!(!report.ok);
    let said = messages(&report).join("\n");
    assert!(said.contains("common state is gone"), "{said}");
    assert!(report.problems.iter().any(|p| p.file.as_deref() == Some("__1_1.distcp")), "{said}");
}

#[test]
fn what_was_changed_since_it_was_hashed_is_found_in_a_deep_check() {
    let storage = stored("head020_basic_integrity");
    let mut json = get(&*storage, "metadata.json").unwrap();
    json.push(b'\n');
    put(&*storage, "metadata.json", json);
    let shallow = report(&storage, false);
    assert!(shallow.ok);
    assert!(shallow.notes.iter().any(|note| note.contains("integrity.json")));
    let deep = report(&storage, true);
    assert!(messages(&deep).iter().any(|said| said.contains("SHA-256")), "{:?}", messages(&deep));
    for (json, said) in [
        ("{", "integrity manifest"),
        (r#"{"algorithm": "md5", "files": {}}"#, "\"md5\""),
        (r#"{"algorithm": "sha256", "files": {"../a": "0"}}"#, "not a name of a file"),
    ] {
        put(&*storage, "integrity.json", json.into());
        let found = messages(&report(&storage, true)).join("\n");
        assert!(found.contains(said), "{found}");
    }
}

#[test]
fn a_part_of_an_array_that_is_gone_is_a_problem() {
    let storage = stored("v09_zarr");
    remove(&*storage, "row.weight/0.1");
    remove(&*storage, "rng_state/shard_0.1_1.2.pt");
    let report = report(&storage, false);
    let said = messages(&report).join("\n");
    assert!(said.contains("\"0.1\" is missing"), "{said}");
    assert!(said.contains("1 are missing"), "{said}");
}

#[test]
fn a_rank_of_the_old_format_that_is_damaged_is_named() {
    let storage = stored("run_legacy_torch_tp2");
    let name = "iter_0000010/mp_rank_01/distrib_optim.pt";
    let mut bytes = get(&*storage, name).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    put(&*storage, name, bytes);
    assert!(report(&storage, false).ok);
    let report = report(&storage, true);
    let files: Vec<_> = report.problems.iter().filter_map(|p| p.file.as_deref()).collect();
    assert_eq!(files, ["mp_rank_01/distrib_optim.pt"], "{:?}", messages(&report));
}

#[test]
fn an_optimizer_that_one_rank_of_the_old_format_has_lost_is_a_problem() {
    let storage = stored("run_legacy_torch_tp2");
    remove(&*storage, "iter_0000010/mp_rank_01/distrib_optim.pt");
    let found = messages(&report(&storage, false)).join("\n");
    assert!(found.contains("mp_rank_01") && found.contains("no distrib_optim.pt"), "{found}");
    let strict = MegatronOpenOptions::default();
    let error = block_on(MegatronCheckpoint::open(&storage, &strict)).unwrap_err();
    assert!(error.to_string().contains("mp_rank_01"), "{error}");
    remove(&*storage, "iter_0000010/mp_rank_00/distrib_optim.pt");
    assert!(report(&storage, false).ok);
}
