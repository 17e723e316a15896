//! `report`: a page of one's own, and the same as JSON.

use std::fs;

use serde_json::Value;

use crate::support::{all_fixtures, copy_of, dcp, path, read_json};

/// What a page holds, as its script finds it.
fn data(page: &str) -> Value {
    let (_, behind) = page.split_once("id=\"report\">").unwrap();
    serde_json::from_str(behind.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn every_fixture_has_a_page_that_says_what_inspect_says() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in all_fixtures() {
        let output = path(&folder, &format!("{fixture}.html"));
        let said = dcp(["report", &fixture, "-o", &output]).ok();
        assert!(said.starts_with(&output), "{said}");
        let page = fs::read_to_string(&output).unwrap();
        for remote in ["src=", "href=", "@import", "url(http", "fetch(", "XMLHttpRequest"] {
            assert!(!page.contains(remote), "{fixture}: {remote}");
        }
        let (found, summary) = (data(&page), dcp(["inspect", &fixture, "--json"]).json());
        assert_eq!(found, dcp(["report", &fixture, "--json"]).json(), "{fixture}");
        let keys = summary["keys"].as_object().unwrap();
        let listed = found["keys"].as_array().unwrap();
        assert_eq!(listed.len(), keys.len());
        for ((name, key), shown) in keys.iter().zip(listed) {
            assert_eq!(shown["name"], *name);
            assert_eq!(shown["kind"], key["kind"]);
            let Some(chunks) = key["chunks"].as_array() else {
                assert_eq!(shown["value"], key["value"], "{fixture} {name}");
                continue;
            };
            let column = |name: &str| -> Vec<Value> {
                let of_chunks = chunks.iter().map(|chunk| chunk[name].clone());
                of_chunks.flat_map(|v| v.as_array().cloned().unwrap_or(vec![v])).collect()
            };
            for (field, columns) in [
                ("offsets", "offsets"),
                ("sizes", "sizes"),
                ("byte_offset", "byte_offsets"),
                ("byte_len", "byte_lens"),
            ] {
                assert_eq!(shown["chunks"][columns], Value::from(column(field)), "{name}");
            }
            for (chunk, file) in chunks.iter().zip(shown["chunks"]["files"].as_array().unwrap()) {
                let file = file.as_u64().unwrap() as usize;
                assert_eq!(found["files"][file]["name"], chunk["file"], "{name}");
            }
        }
    }
}

#[test]
fn sums_are_those_of_the_checkpoint() {
    let report = dcp(["report", "fsdp2_adam_2r", "--json"]).json();
    assert_eq!(report["totals"]["tensors"], 39);
    assert_eq!(report["totals"]["objects"], 17);
    assert_eq!(report["ranks"].as_array().unwrap().len(), 2);
    let parts: Vec<&Value> =
        report["parts"].as_array().unwrap().iter().map(|part| &part["part"]).collect();
    assert_eq!(parts, ["model", "optimizer"]);
    let stack = &report["stacks"][0];
    assert_eq!(
        (&stack["name"], stack["layers"].as_array().unwrap().len()),
        (&"model.layers".into(), 2)
    );
    assert!(
        stack["layers"][0]["optimizer_bytes"].as_u64() > stack["layers"][0]["model_bytes"].as_u64()
    );
}

#[test]
fn a_report_is_replaced_only_when_asked_and_tells_of_missing_files() {
    let folder = copy_of("fsdp2_adam_2r");
    fs::remove_file(folder.path().join("__1_0.distcp")).unwrap();
    let (uri, output) = (path(&folder, ""), path(&folder, "report.json"));
    dcp(["report", &uri]).fails(2, &["--output"]);
    dcp(["report", &uri, "--json", "-o", &output]).ok();
    let report = read_json(output.as_ref());
    assert_eq!(report["totals"]["missing_files"], 1);
    assert_eq!(report["files"][1]["bytes"], Value::Null);
    dcp(["report", &uri, "-o", &output]).fails(2, &["exists already", "--overwrite"]);
    assert_eq!(read_json(output.as_ref()), report, "it is untouched");
    dcp(["report", &uri, "-o", &output, "--overwrite"]).ok();
    assert!(fs::read_to_string(&output).unwrap().starts_with("<!doctype html>"));
}

#[test]
fn statistics_are_those_of_stats() {
    for fixture in ["all_dtypes", "fsdp2_adam_2r", "quantized"] {
        let report = dcp(["report", fixture, "--json", "--stats"]).json();
        let stats = dcp(["stats", fixture, "--json"]).json();
        let mut tensors = 0;
        for key in report["keys"].as_array().unwrap() {
            if key["kind"] != "tensor" {
                continue;
            }
            tensors += 1;
            let (found, expected) =
                (&key["numbers"], &stats["tensors"][key["name"].as_str().unwrap()]);
            for field in ["count", "min", "max", "mean", "std", "nan", "zero", "subnormal"] {
                assert_eq!(found[field], expected[field], "{fixture} {} {field}", key["name"]);
            }
            let bins = expected["histogram"].as_array().unwrap();
            for (column, field) in
                [("exponents", "exponent"), ("negative", "negative"), ("positive", "positive")]
            {
                let of_bins: Vec<Value> = bins.iter().map(|bin| bin[field].clone()).collect();
                assert_eq!(found[column], Value::from(of_bins), "{fixture} {}", key["name"]);
            }
        }
        assert_eq!(tensors, stats["tensors"].as_object().unwrap().len());
        assert_eq!(report["non_finite"]["nan"], stats["total"]["nan"]);
    }
}
