//! The programs of the book's page "Five programs": that page shows these files, and they run.

#![allow(unreachable_pub, reason = "programs of readers, with names of their own")]

mod convert;
mod load_anywhere;
mod own_planner;
mod own_storage;
mod save_on_ranks;

use std::path::Path;
use std::sync::Arc;

use dcp::planner::DefaultSavePlanner;
use dcp::{Checkpointer, Settings, StateDict, Tensor};
use dcp_testing::{fixture, on_ranks};

/// Each program, with the most lines that it may have, blank ones aside.
const PROGRAMS: [(&str, usize); 5] = [
    (include_str!("save_on_ranks.rs"), 20),
    (include_str!("load_anywhere.rs"), 6),
    (include_str!("convert.rs"), 3),
    (include_str!("own_storage.rs"), 100),
    (include_str!("own_planner.rs"), 20),
];

/// A file of these without its first line, which says what it is.
fn shown(program: &'static str) -> &'static str {
    program.split_once("\n\n").unwrap().1
}

fn page() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides/programs.md");
    std::fs::read_to_string(page).unwrap()
}

#[test]
fn the_page_shows_the_programs_that_run_here() {
    let page = page();
    let blocks = page.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let blocks: Vec<&str> = blocks.collect();
    assert_eq!(blocks, PROGRAMS.map(|(program, _)| shown(program)));
    for (program, lines_max) in PROGRAMS {
        let lines = shown(program).lines().filter(|line| !line.trim().is_empty()).count();
        assert!(lines <= lines_max, "{lines} lines, at most {lines_max} are promised:\n{program}");
    }
}

#[test]
fn the_documentation_of_storage_has_the_one_of_the_book() {
    let core = include_str!("../../../../dcp-core/src/storages/storage.rs");
    let comments = core.lines().filter_map(|line| line.strip_prefix("///"));
    let text: Vec<&str> = comments.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    assert!(text.join("\n").contains(shown(include_str!("own_storage.rs"))));
}

#[test]
fn four_ranks_save_and_one_loads_and_converts() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).display().to_string();
    on_ranks(4, |_, group| save_on_ranks::save(group, &place("saved")).unwrap());
    dcp::block_on(convert::convert(&place("saved"), &place("model"))).unwrap().unwrap();
    for url in [place("saved"), place("model")] {
        let state = load_anywhere::load(&url).unwrap();
        let weight = state.at("weight").unwrap().as_tensor().unwrap();
        let rows: Vec<f32> = weight.shards()[0].to_vec_of().unwrap();
        let (of_rank_0, of_rank_1) = rows.split_at(128 * 64);
        assert!(of_rank_0.iter().all(|value| *value == 0.0), "{url}");
        assert!(of_rank_1.iter().all(|value| *value == 1.0), "{url}");
        assert_eq!(of_rank_1.len(), 128 * 64);
    }
    // A checkpoint without the weight is refused, of whatever format.
    let other = fixture("torch_save/t215/zip.pt").display().to_string();
    assert!(load_anywhere::load(&other).unwrap_err().to_string().contains("weight"));
}

#[test]
fn a_storage_in_a_hundred_lines_keeps_every_clause_and_serves_urls() {
    let map = own_storage::MapStorage::default();
    let open = || async { Arc::new(own_storage::MapStorage::default()) as _ };
    assert!(dcp_conformance::passes(dcp_conformance::storage::trials("map", open)));

    let mut storages = dcp::StorageRegistry::empty();
    storages.register("map", move |_| Ok(Arc::new(map.clone())));
    let checkpointer = Checkpointer::new().storages(storages);
    let state = StateDict::from([("w", Tensor::from_vec(vec![1.0_f32, 2.0], [2]).unwrap())]);
    checkpointer.save(&state, "map://run/step_1").blocking().unwrap();
    let zeros = Tensor::from_vec(vec![0.0_f32; 2], [2]).unwrap();
    let mut loaded = StateDict::from([("w", zeros)]);
    checkpointer.load(&mut loaded, "map://run/step_1").blocking().unwrap();
    assert!(loaded.at("w").unwrap().same(state.at("w").unwrap()));
}

#[test]
fn a_planner_in_twenty_lines_keeps_every_clause_and_plans_saves() {
    let planner = Arc::new(own_planner::WithoutTeacher(DefaultSavePlanner::new()));
    let clauses = dcp_conformance::planner::save_trials("without", planner.clone());
    assert!(dcp_conformance::passes(clauses));

    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("student").display().to_string();
    let state = StateDict::from([("student.w", 1), ("teacher.w", 2)]);
    let checkpointer = Checkpointer::with_settings(Settings::new().save_planner(planner));
    assert_eq!(checkpointer.save(&state, &url).blocking().unwrap().entries, 1);
    let stored = dcp::block_on(async { dcp::open(&url).await?.load().run().await });
    let stored = stored.unwrap().unwrap();
    assert!(stored.at("student.w").is_some() && stored.at("teacher.w").is_none());
}
