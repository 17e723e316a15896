//! Golden vectors of PyTorch 2.15's planner arithmetic (`fixtures/pytorch/vectors`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use dcp_core::metadata::{Entry, FileId, TensorEntry};
use dcp_core::path::PathItem;
use dcp_core::plan::{
    LeafKind, PlanContext, PlanKey, ReadKind, SavePlan, StateIndex, StateLeaf, TensorSpec,
};
use dcp_core::planner::{LoadPlanner, SavePlanner};
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, DType, Dims, Region, Tensor, Value};
use dcp_planner::mesh::{DeviceMesh, TensorPlacement, local_regions, recorded_box};
use dcp_planner::{DedupPolicy, DefaultLoadPlanner, DefaultSavePlanner, FlattenRule, flatten};
use serde_json::Value as Json;

fn vectors(name: &str) -> Vec<Json> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/pytorch/vectors");
    let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn list(json: &Json) -> &Vec<Json> {
    json.as_array().unwrap()
}

fn numbers(json: &Json) -> Dims {
    list(json).iter().map(|n| n.as_u64().unwrap()).collect()
}

fn region(json: &Json) -> Region {
    Region::new(numbers(&json[0]), numbers(&json[1])).unwrap()
}

fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Number(n) => Value::Int(n.as_i64().unwrap()),
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => Value::List(items.iter().map(value).collect()),
        Json::Object(fields) if fields.contains_key("T") => {
            Tensor::zeros(DType::Float32, [1]).unwrap().into()
        }
        Json::Object(fields) => Value::Dict(dict(fields)),
        Json::Bool(b) => (*b).into(),
    }
}

fn dict(fields: &serde_json::Map<String, Json>) -> Dict {
    fields.iter().map(|(key, field)| (key.as_str(), value(field))).collect()
}

#[test]
fn flatten_agrees() {
    for case in vectors("flatten") {
        let state = dict(case["in"].as_object().unwrap());
        let flat = flatten(&state, FlattenRule::Torch24).unwrap();
        let expected = list(&case["keys"]);
        assert_eq!(flat.len(), expected.len(), "{case}");
        for (leaf, expected) in flat.iter().zip(expected) {
            assert_eq!(&*leaf.fqn, expected[0].as_str().unwrap());
            let path: Vec<PathItem> = list(&expected[1])
                .iter()
                .map(|step| match step {
                    Json::String(key) => PathItem::Key(key.as_str().into()),
                    index => PathItem::Index(index["i"].as_u64().unwrap()),
                })
                .collect();
            assert_eq!(**leaf.path.as_ref().unwrap(), *path);
            match expected[2].as_str() {
                Some("tensor") => assert!(leaf.value.as_tensor().is_some()),
                _ => assert!(leaf.value.same(&value(&expected[2])), "{case}"),
            }
        }
    }
}

fn placements(case: &Json) -> Vec<TensorPlacement> {
    let axis = |json: &Json| usize::try_from(json.as_u64().unwrap()).unwrap();
    let one = |json: &Json| match json.as_object().unwrap().iter().next().unwrap() {
        (kind, of) if kind == "S" => TensorPlacement::Shard(axis(of)),
        (kind, of) if kind == "SS" => TensorPlacement::StridedShard {
            axis: axis(&of[0]),
            split_factor: of[1].as_u64().unwrap(),
        },
        _ => TensorPlacement::Replicate,
    };
    list(&case["placements"]).iter().map(one).collect()
}

#[test]
fn dtensor_boxes_agree() {
    let (mut ranks, mut strided, mut moved) = (0, 0, 0);
    for case in vectors("dtensor_local_shape_offset") {
        let shape = numbers(&case["shape"]);
        let mesh = DeviceMesh::new(numbers(&case["mesh"])).unwrap();
        let placements = placements(&case);
        for rank in list(&case["ranks"]) {
            let coordinate = numbers(&rank[0]);
            let expected = Region::new(numbers(&rank[2]), numbers(&rank[1])).unwrap();
            let recorded = recorded_box(&shape, &mesh, &coordinate, &placements).unwrap();
            assert_eq!(recorded, expected, "{case} {coordinate}");
            ranks += 1;
            let held = local_regions(&shape, &mesh, &coordinate, &placements).unwrap();
            if placements.iter().any(|p| matches!(p, TensorPlacement::StridedShard { .. })) {
                strided += 1;
                moved += usize::from(held != [expected]);
            } else {
                assert_eq!(held, [expected], "{case} {coordinate}");
            }
        }
    }
    assert_eq!(ranks, 2386);
    assert!(moved > 0 && moved < strided, "{moved} of {strided}");
}

/// A rank's plan, and for each of its items the vector's description.
fn save_plan(items: &[Json]) -> SavePlan {
    let mut plan = SavePlan::new();
    for item in items {
        let fqn: Arc<str> = item["fqn"].as_str().unwrap().into();
        let tensor = (item["type"] != "BYTE_IO").then(|| TensorSpec {
            dtype: item["dtype"].as_str().unwrap().parse().unwrap(),
            shape: numbers(&item["size"]),
            sharded: item["type"] == "SHARD",
        });
        let known = plan.keys().iter().position(|key| key.fqn == fqn);
        let is_tensor = tensor.is_some();
        let key = known.unwrap_or_else(|| plan.push_key(PlanKey { fqn, path: None, tensor }));
        if is_tensor {
            plan.push_chunk(key, &region(&item["chunk"])).unwrap();
        } else {
            plan.push_object(key, 1).unwrap();
        }
    }
    plan
}

#[test]
fn dedup_and_order_agree() {
    for case in vectors("dedup_global_plan") {
        let plans = list(&case["plans"]);
        let locals: Vec<_> = plans.iter().map(|items| save_plan(list(items))).collect();
        let policy = match case["save_to_lowest_rank"].as_bool().unwrap() {
            true => DedupPolicy::LowestRank,
            false => DedupPolicy::TorchCompatible,
        };
        let planner = DefaultSavePlanner::new().dedup(policy).validate(false);
        let global = planner.global_plan(&locals).unwrap();
        for (rank, expected) in list(&case["global_plans"]).iter().enumerate() {
            let selected = &global.selections[rank];
            assert_eq!(selected.len(), list(expected).len());
            for (selected, expected) in selected.iter().zip(list(expected)) {
                let item = &plans[rank][selected.item as usize];
                assert_eq!((&item["fqn"], &item["chunk"]), (&expected["fqn"], &expected["chunk"]));
                let (fqn, entry) = global.metadata.at(selected.entry as usize).unwrap();
                assert_eq!(**fqn, *expected["fqn"].as_str().unwrap());
                if let Some(index) = expected["index"].as_u64() {
                    assert_eq!(u64::from(selected.chunk), index);
                    let chunk = entry.as_tensor().unwrap().chunks.get(selected.chunk as usize);
                    assert_eq!(chunk.unwrap().region().unwrap(), region(&expected["chunk"]));
                }
            }
        }
        let expected = list(&case["metadata"]);
        assert_eq!(global.metadata.len(), expected.len());
        for ((fqn, entry), expected) in global.metadata.iter().zip(expected) {
            assert_eq!(**fqn, *expected[0].as_str().unwrap());
            match entry {
                Entry::Tensor(tensor) => {
                    assert_eq!(tensor.shape, numbers(&expected[1]["size"]));
                    let chunks: Vec<_> =
                        tensor.chunks.iter().map(|chunk| chunk.region().unwrap()).collect();
                    let expected: Vec<_> =
                        list(&expected[1]["chunks"]).iter().map(region).collect();
                    assert_eq!(chunks, expected);
                }
                _ => assert_eq!(expected[1], "bytes"),
            }
        }
    }
}

#[test]
fn validation_agrees() {
    let mut refused = 0;
    for case in vectors("validate_global_plan") {
        let spec =
            TensorSpec { dtype: DType::Float32, shape: numbers(&case["shape"]), sharded: true };
        // The chunks go to the ranks in turn, so that no rank has two at one place.
        let ranks = usize::try_from(case["num_plans"].as_u64().unwrap()).unwrap();
        let mut locals = vec![SavePlan::new(); ranks];
        for local in &mut locals {
            local.push_key(PlanKey { fqn: "w".into(), path: None, tensor: Some(spec.clone()) });
        }
        let mut seen = BTreeSet::new();
        let mut repeated = false;
        for (position, chunk) in list(&case["chunks"]).iter().enumerate() {
            let chunk = region(chunk);
            repeated |= !seen.insert(chunk.clone()) && !chunk.is_empty();
            locals[position % ranks].push_chunk(0, &chunk).unwrap();
        }
        let valid = DefaultSavePlanner::new().global_plan(&locals).is_ok();
        let expected = list(&case["errors"]).is_empty();
        // Where a chunk comes twice, planning drops it before validation sees it.
        if !repeated {
            assert_eq!(valid, expected, "{case}");
        }
        refused += usize::from(!valid);
        // The same without planning: all chunks, repeated ones too.
        let mut stored = TensorEntry::new(DType::Float32, spec.shape.clone());
        let mut metadata = CheckpointMetadata::new();
        let placement = placed(&mut metadata);
        for chunk in list(&case["chunks"]) {
            let chunk = region(chunk);
            stored.chunks.push(chunk.offsets(), chunk.sizes(), Some(placement)).unwrap();
        }
        metadata.insert("w", Entry::Tensor(stored));
        let errors = dcp_planner::validate_metadata(&metadata);
        let kinds = |errors: &[String]| {
            let has = |word: &str| errors.iter().any(|error| error.contains(word));
            (has("overlapping"), has("out of bounds") || has("is outside of"))
        };
        let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
        let theirs: Vec<_> =
            list(&case["errors"]).iter().map(|e| e.as_str().unwrap().to_owned()).collect();
        let (ours, theirs) = (kinds(&errors), kinds(&theirs));
        assert_eq!(ours.1, theirs.1, "{case}");
        // Chunks that stick out are left out of the search for overlaps.
        assert!(ours.0 == theirs.0 || ours.1, "{case} {errors:?}");
    }
    assert!(refused > 30);
}

fn placed(metadata: &mut CheckpointMetadata) -> dcp_core::metadata::Placement {
    metadata.intern_file(&dcp_core::Key::new("f").unwrap());
    metadata.intern_encoding(&dcp_core::metadata::Encoding::default());
    let file = FileId::from_index(0).unwrap();
    dcp_core::metadata::Placement { file, encoding: 0, byte_offset: 0, byte_len: 0 }
}

#[test]
fn reshard_items_agree_in_order() {
    let mut total = 0;
    for case in vectors("reshard_read_items") {
        let shape = numbers(&case["shape"]);
        let mut stored = TensorEntry::new(DType::Float32, shape.clone());
        let mut metadata = CheckpointMetadata::new();
        let placement = placed(&mut metadata);
        for chunk in list(&case["saved"]) {
            let chunk = region(chunk);
            stored.chunks.push(chunk.offsets(), chunk.sizes(), Some(placement)).unwrap();
        }
        metadata.insert("w", Entry::Tensor(stored));
        let regions: Vec<_> = list(&case["local"]).iter().map(region).collect();
        let kind = LeafKind::Tensor { dtype: DType::Float32, shape, sharded: true, regions };
        let leaf = StateLeaf { fqn: "w".into(), path: None, kind };
        let wanted = StateIndex { leaves: vec![leaf] };
        let (plan, report) =
            DefaultLoadPlanner::new().local_plan(&wanted, &metadata, &PlanContext::solo()).unwrap();
        let found: Vec<_> = plan
            .items
            .iter()
            .map(|item| match &item.kind {
                ReadKind::Tensor { chunk, shard, region } => (*shard, *chunk, region.clone()),
                other => panic!("{other:?}"),
            })
            .collect();
        let expected: Vec<_> = list(&case["read_items"])
            .iter()
            .map(|item| {
                let index = |of: &str| u32::try_from(item[of][1].as_u64().unwrap()).unwrap();
                let chunk = numbers(&item["storage_index"][0]);
                let offsets = numbers(&item["storage_offsets"]);
                let region = Region::new(offsets, numbers(&item["lengths"])).unwrap();
                let region = region.translate(&chunk).unwrap();
                (index("dest_index"), index("storage_index"), region)
            })
            .collect();
        assert_eq!(found, expected, "{case}");
        assert!(report.missing.is_empty() && report.shapes.is_empty());
        total += found.len();
    }
    assert!(total > 200, "{total}");
}
