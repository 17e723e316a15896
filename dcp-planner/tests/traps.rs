//! Mistakes that PyTorch's planning makes, and surprises of its format: each is met here.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use dcp_core::error::{ChunksProblem, PlanSubject, RanksProblem, StateProblem};
use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::path::{PathItem, StatePath};
use dcp_core::plan::{GlobalPlan, LeafKind, PlanContext, PlanKey, SavePlan, TensorSpec};
use dcp_core::planner::{LoadPlanner, SavePlanner};
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, DType, PlanError, Region, StateDict, Tensor, Value};
use dcp_planner::mesh::{DeviceMesh, TensorPlacement, local_regions, recorded_box};
use dcp_planner::{
    DefaultLoadPlanner, DefaultSavePlanner, FlattenRule, KeyFilter, PlanCache, ShardAxis, Template,
    choose_rule, flatten, index_of, set_at_path, unflatten, validate_metadata,
};
use support::{index, object, place_all, save, tensor, whole};

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets, sizes).unwrap()
}

fn offers(leaves: impl IntoIterator<Item = dcp_core::plan::StateLeaf>) -> Vec<SavePlan> {
    leaves
        .into_iter()
        .map(|leaf| {
            DefaultSavePlanner::new().local_plan(&index(vec![leaf]), &PlanContext::solo()).unwrap()
        })
        .collect()
}

fn merge(
    leaves: impl IntoIterator<Item = dcp_core::plan::StateLeaf>,
) -> Result<GlobalPlan, PlanError> {
    DefaultSavePlanner::new().global_plan(&offers(leaves))
}

fn stored(shape: &[u64], chunks: &[Region]) -> CheckpointMetadata {
    let mut entry = TensorEntry::new(DType::UInt32, shape);
    for chunk in chunks {
        entry.chunks.push(chunk.offsets(), chunk.sizes(), None).unwrap();
    }
    let mut metadata = CheckpointMetadata::new();
    metadata.insert("w", Entry::Tensor(entry));
    place_all(&mut metadata);
    metadata
}

#[test]
fn t07_uneven_fsdp2_with_tp_describes_the_data() {
    let mesh = DeviceMesh::new([3, 2]).unwrap();
    let placements =
        [TensorPlacement::StridedShard { axis: 0, split_factor: 2 }, TensorPlacement::Shard(0)];
    let held = |dp, tp| local_regions(&[7, 4], &mesh, &[dp, tp], &placements).unwrap();
    let recorded = |dp, tp| recorded_box(&[7, 4], &mesh, &[dp, tp], &placements).unwrap();
    assert_eq!(recorded(2, 0), region(&[6, 0], &[1, 4]));
    assert_eq!(held(2, 0), [region(&[7, 0], &[0, 4])]);
    assert_eq!(recorded(2, 1), region(&[7, 0], &[0, 4]));
    assert_eq!(held(2, 1), [region(&[6, 0], &[1, 4])]);
    // All ranks together make a checkpoint that validates.
    let leaves = (0..6).map(|rank| {
        let coordinate = mesh.coordinate(rank).unwrap();
        let regions = local_regions(&[7, 4], &mesh, &coordinate, &placements).unwrap();
        tensor("w", &[7, 4], true, regions)
    });
    assert!(merge(leaves).is_ok());
}

#[test]
fn t08_ranks_that_contradict_each_other_are_named() {
    let spec = |shape: &[u64], dtype, sharded| LeafKind::Tensor {
        dtype,
        shape: shape.into(),
        sharded,
        regions: vec![whole(shape)],
    };
    let first = spec(&[4], DType::Float32, false);
    for other in [
        spec(&[5], DType::Float32, false),
        spec(&[4], DType::BFloat16, false),
        spec(&[4], DType::Float32, true),
        LeafKind::Object { byte_len: 3 },
    ] {
        let kinds = [first.clone(), first.clone(), other];
        let leaves =
            kinds.map(|kind| dcp_core::plan::StateLeaf { fqn: "w".into(), path: None, kind });
        match merge(leaves) {
            Err(PlanError::Ranks(RanksProblem::Disagreement {
                subject,
                left_rank: 0,
                right_rank: 2,
                ..
            })) => {
                assert_eq!(subject, PlanSubject::Entry("w".to_owned()));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn t08_chunks_at_one_place_of_different_sizes_are_refused() {
    let chunk = |sizes: &[u64]| tensor("w", &[4, 4], true, vec![region(&[0, 0], sizes)]);
    let rest = tensor("w", &[4, 4], true, vec![region(&[2, 0], &[2, 4])]);
    let error = merge([chunk(&[2, 4]), rest.clone(), chunk(&[1, 4])]).unwrap_err();
    let PlanError::Ranks(RanksProblem::Disagreement { left_rank: 0, right_rank: 2, .. }) = &error
    else {
        panic!("{error}")
    };
    assert!(error.to_string().contains("[0:2, 0:4]"), "{error}");
    // An empty shard where another begins says nothing, whichever comes first.
    let global = merge([chunk(&[0, 4]), chunk(&[2, 4]), rest]).unwrap();
    assert_eq!(global.metadata.get("w").unwrap().as_tensor().unwrap().chunks.len(), 2);
    assert!(global.selections[0].is_empty());
}

#[test]
fn every_problem_of_a_save_is_reported() {
    let leaf = |fqn: &str, regions| tensor(fqn, &[8], true, regions);
    let planner = DefaultSavePlanner::new();
    let rank = |chunk: fn(u64) -> Region, rank| {
        let state = index(vec![
            leaf("gap", vec![chunk(rank)]),
            leaf("twice", vec![region(&[2 * rank], &[4])]),
        ]);
        planner.local_plan(&state, &PlanContext::new(rank as u32, 2)).unwrap()
    };
    let chunk = |rank| region(&[4 * rank], &[3]);
    let error = planner.global_plan(&[rank(chunk, 0), rank(chunk, 1)]).unwrap_err();
    let PlanError::Many(errors) = error else { panic!("{error}") };
    assert!(
        matches!(&errors[0], PlanError::Chunks { fqn, problem: ChunksProblem::Uncovered { expected: 8, found: 6 } } if fqn == "gap")
    );
    assert!(
        matches!(&errors[1], PlanError::Chunks { fqn, problem: ChunksProblem::Overlap { .. } } if fqn == "twice")
    );
}

#[test]
fn t09_a_changed_dtype_or_path_is_another_plan() {
    let plan = |dtype, path: Option<&str>| {
        let mut plan = SavePlan::new();
        let tensor = Some(TensorSpec { dtype, shape: [4].into(), sharded: false });
        let path: Option<StatePath> = path.map(|step| [PathItem::Key(step.into())].into());
        let key = plan.push_key(PlanKey { fqn: "w".into(), path, tensor });
        plan.push_chunk(key, &whole(&[4])).unwrap();
        plan
    };
    let cache = PlanCache::default();
    let first = plan(DType::Float32, Some("w"));
    let global = DefaultSavePlanner::new().global_plan(std::slice::from_ref(&first)).unwrap();
    cache.insert([first.fingerprint()], Arc::new(global));
    assert!(cache.get(&[plan(DType::Float32, Some("w")).fingerprint()]).is_some());
    for changed in [plan(DType::Float16, Some("w")), plan(DType::Float32, None)] {
        assert!(cache.get(&[changed.fingerprint()]).is_none());
    }
}

#[test]
fn t15_what_a_load_cannot_fill_is_reported() {
    let mut metadata = stored(&[8], &[region(&[0], &[2]), region(&[4], &[4])]);
    let mut lost = TensorEntry::new(DType::UInt32, [3]);
    lost.chunks.push(&[0], &[3], None).unwrap();
    metadata.insert("lost", Entry::Tensor(lost));
    metadata.insert("lost object", Entry::Object(ObjectEntry::new(None)));
    metadata.insert("was an object", Entry::Object(ObjectEntry::new(None)));
    metadata.insert("extra", Entry::Object(ObjectEntry::new(None)));
    for (fqn, dtype, shape) in [("cast", DType::Float64, 2), ("grown", DType::UInt32, 1)] {
        let mut entry = TensorEntry::new(dtype, [shape]);
        entry.chunks.push(&[0], &[shape], None).unwrap();
        metadata.insert(fqn, Entry::Tensor(entry));
    }
    let one = |fqn: &str, shape: &[u64]| tensor(fqn, shape, false, vec![whole(shape)]);
    let wanted = index(vec![
        tensor("w", &[8], true, vec![region(&[1], &[4])]),
        one("lost", &[3]),
        object("lost object", 0),
        one("was an object", &[1]),
        one("cast", &[2]),
        one("grown", &[]),
        one("absent", &[2]),
    ]);
    let (plan, report) =
        DefaultLoadPlanner::new().local_plan(&wanted, &metadata, &PlanContext::solo()).unwrap();
    assert_eq!(plan.items.len(), 2);
    let names = |names: &[Arc<str>]| names.join(", ");
    assert_eq!(names(&report.missing), "lost object, absent");
    assert_eq!(names(&report.unexpected), "extra");
    assert_eq!(report.uncovered, [("w".into(), 2), ("lost".into(), 3)]);
    assert_eq!(report.dtypes, [("cast".into(), DType::Float64, DType::UInt32)]);
    assert_eq!(report.shapes, [("grown".into(), [1].into(), [].into())]);
    assert_eq!(report.kinds, [("was an object".into(), false)]);
    assert!(!report.is_complete());
}

#[test]
fn t01_chunks_without_stored_bytes_are_found() {
    let mut metadata = stored(&[4], &[region(&[0], &[4])]);
    let mut entry = TensorEntry::new(DType::UInt32, [4]);
    entry.chunks.push(&[0], &[4], None).unwrap();
    metadata.insert("lost", Entry::Tensor(entry));
    metadata.insert("object", Entry::Object(ObjectEntry::new(None)));
    let errors: Vec<_> = validate_metadata(&metadata).iter().map(ToString::to_string).collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("\"lost\"") && errors[0].contains("no stored bytes"));
}

#[test]
fn overlapping_stored_chunks_never_fill_an_element_twice() {
    let wanted = index(vec![tensor("w", &[8], false, vec![whole(&[8])])]);
    let planner = DefaultLoadPlanner::new();
    let plan =
        |metadata: &CheckpointMetadata| planner.local_plan(&wanted, metadata, &PlanContext::solo());
    // An overlap that a gap makes up for in numbers.
    let metadata = stored(&[8], &[region(&[0], &[4]), region(&[2], &[4])]);
    assert!(matches!(
        plan(&metadata),
        Err(PlanError::Chunks { problem: ChunksProblem::Overlap { .. }, .. })
    ));
    // The same chunk twice, as merged metadata of single ranks has it.
    let twice = [region(&[0], &[8]), region(&[0], &[8])];
    let (plan, report) = plan(&stored(&[8], &twice)).unwrap();
    assert_eq!((plan.items.len(), report.is_complete()), (1, true));
}

fn empty_containers() -> StateDict {
    let list = vec![Value::Dict(Dict::new()), Tensor::zeros(DType::Int8, [2]).unwrap().into()];
    StateDict::from([("ld", Value::List(list)), ("empty", Value::Dict(Dict::new()))])
}

#[test]
fn t17_empty_containers_load_without_a_model() {
    let state = empty_containers();
    let flat = flatten(&state, FlattenRule::Torch24).unwrap();
    assert_eq!(flat.iter().map(|leaf| &*leaf.fqn).collect::<Vec<_>>(), ["ld.1"]);
    let planner = DefaultSavePlanner::new();
    let saved = index_of(&flat, |_, _| Ok::<_, PlanError>(0)).unwrap();
    let locals = [planner.local_plan(&saved, &PlanContext::solo()).unwrap()];
    let mut global = planner.global_plan(&locals).unwrap();
    place_all(&mut global.metadata);

    let template = Template::whole(&global.metadata, &KeyFilter::all()).unwrap();
    let (plan, report) = DefaultLoadPlanner::new()
        .local_plan(&template.index(), &global.metadata, &PlanContext::solo())
        .unwrap();
    assert!(report.is_complete() && plan.items.len() == 1, "{report}");
    let nested = template.to_state_dict().unwrap();
    let Some(Value::List(items)) = nested.get("ld") else { panic!("{nested:?}") };
    assert!(matches!(&items[..], [Value::None, Value::Tensor(_)]));
}

#[test]
fn t17_numbers_as_keys_clash_only_with_their_own_text() {
    let inner = |keys: [Value; 2]| {
        StateDict::from([("state", keys.into_iter().map(|key| (key, 1)).collect::<Dict>())])
    };
    let state = inner([0.into(), true.into()]);
    let names: Vec<_> =
        flatten(&state, FlattenRule::Torch24).unwrap().iter().map(|l| l.fqn.to_string()).collect();
    assert_eq!(names, ["state.0", "state.True"]);
    let clash = inner([1.into(), "1".into()]);
    let error = flatten(&clash, FlattenRule::Torch24).unwrap_err();
    assert_eq!(error, StateProblem::Duplicate.of("state.1"));
}

#[test]
fn templates_claim_no_memory_for_what_is_not_stored() {
    let huge = [1 << 50];
    let metadata = stored(&huge, &[region(&[0], &[16])]);
    assert!(matches!(
        Template::whole(&metadata, &KeyFilter::all()),
        Err(PlanError::Chunks { problem: ChunksProblem::Uncovered { found: 16, .. }, .. })
    ));
    // A chunk that claims to be huge, in a file of few bytes.
    let mut metadata = stored(&huge, &[region(&[0], &huge)]);
    let Some(Entry::Tensor(tensor)) = metadata.get_mut("w") else { panic!() };
    let placement = tensor.chunks.get(0).unwrap().placement.unwrap();
    tensor.chunks.place(0, Placement { byte_len: 4096, ..placement });
    assert!(Template::whole(&metadata, &KeyFilter::all()).is_err());
    // A chunk that a reader computes: the caller says how many bytes there are for it.
    let mut computed = stored(&[4, 4], &[whole(&[4, 4])]);
    let layout = computed.intern_encoding(&Encoding::new(Layout::Computed)).unwrap();
    let Some(Entry::Tensor(tensor)) = computed.get_mut("w") else { panic!() };
    let placement = tensor.chunks.get(0).unwrap().placement.unwrap();
    tensor.chunks.place(0, Placement { byte_len: 0, encoding: layout, ..placement });
    let bytes = 16 * tensor.dtype.size() as u64;
    let within = |bytes| Template::whole_within(&computed, &KeyFilter::all(), bytes).is_ok();
    assert_eq!([within(0), within(bytes - 1), within(bytes)], [false, false, true]);
    let overflow = stored(&[u64::MAX, 2], &[]);
    assert!(Template::whole(&overflow, &KeyFilter::all()).is_err());
    assert!(Template::whole(&metadata, &KeyFilter::any_of(["other"])).unwrap().leaves().is_empty());
}

#[test]
fn templates_are_cut_for_the_ranks_of_a_group() {
    let mut metadata = stored(&[5, 40], &[whole(&[5, 40])]);
    let mut scalar = TensorEntry::new(DType::UInt32, []);
    scalar.chunks.push(&[], &[], None).unwrap();
    metadata.insert("scalar", Entry::Tensor(scalar));
    place_all(&mut metadata);
    let regions = |rank, cut| {
        let template = Template::sharded(&metadata, &KeyFilter::all(), rank, 4, cut).unwrap();
        assert!(!template.leaves()[1].value.as_tensor().unwrap().is_sharded());
        let shards = template.leaves()[0].value.as_tensor().unwrap().shards();
        shards.iter().map(|shard| shard.region().clone()).collect::<Vec<_>>()
    };
    assert_eq!(regions(2, ShardAxis::Rows), [region(&[4, 0], &[1, 40])]);
    assert_eq!(regions(3, ShardAxis::Rows), []);
    assert_eq!(regions(3, ShardAxis::LongestAxis), [region(&[0, 30], &[5, 10])]);
}

#[test]
fn f06_shapes_are_those_of_the_whole_tensor() {
    let leaves =
        [0, 1].map(|rank| tensor("w", &[4, 2], true, vec![region(&[2 * rank, 0], &[2, 2])]));
    let global = merge(leaves).unwrap();
    let entry = global.metadata.get("w").unwrap().as_tensor().unwrap();
    assert_eq!(*entry.shape, [4, 2]);
    assert_eq!(entry.properties, dcp_core::metadata::TensorProperties::default());
}

#[test]
fn f08_empty_shards_are_one_chunk_and_chunks_are_in_rank_order() {
    let mesh = DeviceMesh::new([4]).unwrap();
    let leaves = [3, 2, 1, 0].map(|at| {
        tensor(
            "w",
            &[2],
            true,
            local_regions(&[2], &mesh, &[at], &[TensorPlacement::Shard(0)]).unwrap(),
        )
    });
    let global = merge(leaves).unwrap();
    let entry = global.metadata.get("w").unwrap().as_tensor().unwrap();
    let chunks: Vec<_> =
        entry.chunks.iter().map(|chunk| (chunk.offsets[0], chunk.sizes[0])).collect();
    assert_eq!(chunks, [(2, 0), (1, 1), (0, 1)]);
    let nothing =
        merge([tensor("w", &[0], true, vec![]), tensor("w", &[0], true, vec![])]).unwrap();
    assert!(nothing.metadata.get("w").unwrap().as_tensor().unwrap().chunks.is_empty());
    let held_by_nobody = merge([tensor("w", &[1], true, vec![]), tensor("w", &[1], true, vec![])]);
    assert!(matches!(
        held_by_nobody,
        Err(PlanError::Chunks { problem: ChunksProblem::Uncovered { .. }, .. })
    ));
}

#[test]
fn f09_paths_tell_dotted_names_apart() {
    let nest = |outer: &str, inner: &str| StateDict::from([(outer, Dict::from([(inner, 1)]))]);
    for (outer, inner) in [("a", "b.c"), ("a.b", "c"), ("", ""), ("ü /", "*")] {
        let state = nest(outer, inner);
        let flat = flatten(&state, FlattenRule::Torch24).unwrap();
        assert_eq!(*flat[0].fqn, format!("{outer}.{inner}"));
        let path = Arc::clone(flat[0].path.as_ref().unwrap());
        let back = unflatten([(path, flat[0].value.clone())]).unwrap();
        assert!(Value::Dict(back).same(&Value::Dict(state.clone())));
    }
    let both = StateDict::from([("a", Dict::from([("b.c", 1)])), ("a.b", Dict::from([("c", 2)]))]);
    assert!(matches!(
        flatten(&both, FlattenRule::Torch24),
        Err(PlanError::State { fqn, problem: StateProblem::Duplicate }) if fqn == "a.b.c"
    ));
}

#[test]
fn f15_raw_bytes_that_do_not_fit_their_chunk_are_found() {
    let mut metadata = stored(&[4], &[region(&[0], &[4])]);
    assert!(validate_metadata(&metadata).is_empty());
    let Some(Entry::Tensor(tensor)) = metadata.get_mut("w") else { panic!() };
    let placement = tensor.chunks.get(0).unwrap().placement.unwrap();
    tensor.chunks.place(0, Placement { byte_len: 15, ..placement });
    assert_eq!(validate_metadata(&metadata).len(), 1);
}

#[test]
fn f17_lists_of_names_are_one_object() {
    let group = Dict::from([("params", Value::List(vec!["a.weight".into(), "b".into()]))]);
    let state = StateDict::from([("param_groups", vec![Value::Dict(group)])]);
    let flat = flatten(&state, FlattenRule::Torch24).unwrap();
    assert_eq!(flat.iter().map(|leaf| &*leaf.fqn).collect::<Vec<_>>(), ["param_groups.0.params"]);
    assert!(matches!(flat[0].value, Value::List(names) if names.len() == 2));
}

#[test]
fn f19_the_order_of_names_may_differ_between_ranks() {
    let planner = DefaultSavePlanner::new();
    let leaves =
        || (0..6_u64).map(|n| tensor(&format!("t{n}"), &[n + 1], false, vec![whole(&[n + 1])]));
    let straight = index(leaves().collect());
    let reversed = index(leaves().rev().collect());
    let plan = |state| planner.local_plan(state, &PlanContext::new(0, 2)).unwrap();
    let locals = [plan(&straight), plan(&reversed)];
    let mut global = planner.global_plan(&locals).unwrap();
    save(&locals, &mut global);
    assert!(validate_metadata(&global.metadata).is_empty());
    assert_eq!(global.metadata.len(), 6);
}

#[test]
fn old_checkpoints_are_met_by_the_old_rule() {
    let state = StateDict::from([
        ("cfg", Value::Dict(Dict::from([("lr", 0.1)]))),
        ("w", Tensor::zeros(DType::Int8, [1]).unwrap().into()),
        ("list", vec![Value::Dict(Dict::from([("x", 1)]))].into()),
        ("empty", Value::Dict(Dict::new())),
    ]);
    let names = |rule| {
        let flat = flatten(&state, rule).unwrap();
        flat.iter().map(|leaf| leaf.fqn.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(FlattenRule::Torch24), ["cfg.lr", "w", "list.0.x"]);
    assert_eq!(names(FlattenRule::Torch20), ["cfg", "w", "list", "empty"]);
    assert_eq!(names(FlattenRule::TopLevel), ["cfg", "w", "list", "empty"]);
    let holds = |names: &[&str]| {
        let mut metadata = CheckpointMetadata::new();
        for name in names {
            metadata.insert(*name, Entry::Object(ObjectEntry::new(None)));
        }
        metadata
    };
    for (stored, rule) in [
        (holds(&["cfg", "w"]), FlattenRule::Torch20),
        (holds(&["cfg.lr", "w", "more"]), FlattenRule::Torch24),
        (holds(&["w"]), FlattenRule::Torch24),
        (holds(&[]), FlattenRule::Torch24),
    ] {
        assert_eq!(choose_rule(&state, &stored).unwrap(), rule);
    }
}

#[test]
fn hostile_depth_is_refused() {
    let mut value = Value::List(vec![]);
    for _ in 0..600 {
        value = Value::List(vec![value]);
    }
    for rule in [FlattenRule::Torch24, FlattenRule::Torch20] {
        let state = StateDict::from([("x", value.clone())]);
        assert!(matches!(
            flatten(&state, rule),
            Err(PlanError::State { problem: StateProblem::TooDeep { limit: 512, .. }, .. })
        ));
    }
    let mut value = Value::Dict(Dict::from([("w", 1)]));
    for _ in 0..600 {
        value = Value::Dict(Dict::from([("d", value)]));
    }
    let state = StateDict::from([("x", value)]);
    assert!(flatten(&state, FlattenRule::Torch24).is_err());
    assert!(flatten(&state, FlattenRule::TopLevel).is_ok());
}

#[test]
fn loaded_objects_take_their_place() {
    let mut state = StateDict::from([("a", Dict::from([("n", 1)]))]);
    let path = [PathItem::Key("a".into()), PathItem::Key("n".into())];
    set_at_path(&mut state, &path, 2.into()).unwrap();
    assert_eq!(state.get("a").unwrap().as_dict().unwrap().get("n").unwrap().as_int(), Some(2));
}

#[test]
fn replicas_are_balanced_by_bytes() {
    let planner = DefaultSavePlanner::new();
    let state = index(
        (0..40_u64)
            .map(|n| {
                let shape = [100 + n * 7];
                tensor(&format!("t{n}"), &shape, false, vec![whole(&shape)])
            })
            .collect(),
    );
    let locals: Vec<_> = (0..4)
        .map(|rank| planner.local_plan(&state, &PlanContext::new(rank, 4)).unwrap())
        .collect();
    let global = planner.global_plan(&locals).unwrap();
    let bytes: Vec<u64> = global
        .selections
        .iter()
        .zip(&locals)
        .map(|(selected, local)| {
            selected.iter().map(|s| local.item(s.item as usize).unwrap().byte_len).sum()
        })
        .collect();
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    assert!(most - least <= 400, "{bytes:?}");
}
