//! `dcp trace`, and `--trace` of the other commands.

use std::fs;

use dcp::trace::TraceRecorder;
use dcp::{Checkpointer, StateDict, Tensor};

use crate::ranks::on_ranks_with;
use crate::support::{dcp, fixtures, path};

/// Two ranks save a tensor each, with a trace file per rank.
fn traced_save() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "step-1");
    dcp_testing::on_ranks(2, |rank, group| {
        let file = folder.path().join(format!("trace-{rank}.json"));
        let recorder = TraceRecorder::create(file).unwrap();
        let tensor = Tensor::from_slice(&[1.0_f32; 10_000], [10_000_u64]).unwrap();
        let mut state = StateDict::new();
        state.insert(format!("rank{rank}"), tensor);
        let checkpointer = Checkpointer::in_group(group).trace(&recorder);
        checkpointer.save(&state, &target).blocking().unwrap();
        checkpointer.load(&mut state, &target).blocking().unwrap();
        recorder.finish().unwrap();
    });
    folder
}

#[test]
fn the_traces_of_all_ranks_are_drawn() {
    let folder = traced_save();
    let text = dcp(["trace", &path(&folder, "")]).ok();
    for said in [
        "save 0",
        "load 0",
        "slowest rank",
        "rank 0  │",
        "rank 1  │",
        "█ write",
        "█ read",
        "SLOWEST FILES",
        "__1_0.distcp",
        "REQUESTS",
    ] {
        assert!(text.contains(said), "{said:?} is not in\n{text}");
    }
    let json = dcp(["trace", &path(&folder, ""), "--json"]).json();
    assert_eq!(json["ranks"], serde_json::json!([0, 1]));
    let names: Vec<_> =
        json["operations"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["save", "load"]);
    assert_eq!(json["operations"][0]["ranks"][1]["phases"][1]["name"], "write");

    let only = dcp(["trace", &path(&folder, "trace-1.json"), "--json"]).json();
    assert_eq!(only["ranks"], serde_json::json!([1]));
}

#[test]
fn each_rank_has_a_trace_of_its_own_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "t.json");
    for command in [&["verify", "--deep"][..], &["inspect"]] {
        let args = [command, &["t21_plain", "--trace", &file]].concat();
        let args: Vec<String> = args.into_iter().map(ToOwned::to_owned).collect();
        let runs = on_ranks_with(3, |_| args.clone());
        let said = format!(
            "note: each of 3 ranks has a trace of its own: {file:?} is that of rank 0, {:?} that of",
            path(&folder, "t.rank2.json")
        );
        assert!(runs[0].stderr.contains(&said), "{}", runs[0].stderr);
        for (rank, run) in runs.iter().enumerate() {
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert!(rank == 0 || !run.stderr.contains("trace"), "{}", run.stderr);
            let name = if rank == 0 { "t.json".to_owned() } else { format!("t.rank{rank}.json") };
            let text = fs::read_to_string(folder.path().join(&name)).unwrap();
            assert!(text.contains(&format!("dcp {}", command[0])), "{name}");
            fs::remove_file(folder.path().join(name)).unwrap();
        }
    }
}

#[test]
fn merged_traces_have_the_events_of_all() {
    let folder = traced_save();
    let (first, second) = (path(&folder, "trace-0.json"), path(&folder, "trace-1.json"));
    let merged = path(&folder, "merged.json");
    dcp(["trace", &first, &second, "--merge", &merged]).ok();
    let all = dcp(["trace", &merged, "--json"]).json();
    assert_eq!(all, dcp(["trace", &first, &second, "--json"]).json());
    let events: Vec<serde_json::Value> =
        serde_json::from_slice(&fs::read(&merged).unwrap()).unwrap();
    assert!(events.is_sorted_by(|left, right| left["ts"].as_f64() <= right["ts"].as_f64()));
}

#[test]
fn every_command_records_its_requests() {
    let folder = tempfile::tempdir().unwrap();
    let (source, trace) = (fixtures().join("t21_plain"), path(&folder, "convert.json"));
    let target = path(&folder, "out.safetensors");
    let source = source.display().to_string();
    dcp(["convert", &source, &target, "--to", "safetensors", "--trace", &trace]).ok();
    let json = dcp(["trace", &trace, "--json"]).json();
    assert_eq!(json["operations"][0]["name"], "dcp convert");
    let files = json["files"].as_array().unwrap();
    let written =
        |file: &str| files.iter().find(|one| one["file"] == file).map(|one| &one["written"]);
    assert_eq!(written("out.safetensors").unwrap(), true);
    assert_eq!(written(".metadata").unwrap(), false);
    assert_eq!(json["is_cut"], false);
}

#[test]
fn a_trace_of_a_killed_process_is_read_with_a_note() {
    let folder = traced_save();
    let file = folder.path().join("trace-0.json");
    let text = fs::read(&file).unwrap();
    fs::write(&file, &text[..text.len() / 2]).unwrap();
    let run = dcp(["trace", &path(&folder, "")]);
    assert!(run.stderr.contains("its process died or still runs"), "{}", run.stderr);
    run.ok();
}

#[test]
fn what_is_no_trace_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let (all, nowhere) = (path(&folder, ""), path(&folder, "none/trace.json"));
    dcp(["trace", &all]).fails(1, &["has no *.json file", "--trace FILE"]);
    fs::write(folder.path().join("config.json"), "{\"layers\": 3}").unwrap();
    dcp(["trace", &all]).fails(1, &["\"config.json\"", "traceEvents"]);
    dcp(["trace", &path(&folder, "none.json")]).fails(3, &["none.json"]);
    dcp(["ls", &all, "--trace", &nowhere]).fails(3, &["cannot write the trace", "none/trace.json"]);
}

#[test]
fn names_in_a_trace_cannot_act_on_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let event = r#"{"ph":"X","cat":"request","name":"read \u001b[2J","ts":1,"dur":2,"args":{"file":"\u001b]0;x\u0007"}}"#;
    let failed = r#"{"ph":"X","cat":"phase","name":"save","tid":1,"dur":5,"args":{"number":0,"error":"\u001b[31m"}}"#;
    fs::write(folder.path().join("t.json"), format!("[{event},{failed}]")).unwrap();
    let text = dcp(["trace", &path(&folder, "t.json")]).ok();
    assert!(!text.contains('\x1b') && text.contains("failed"), "{text:?}");
}
