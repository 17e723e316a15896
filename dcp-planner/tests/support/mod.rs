//! A checkpoint in memory: tensors of `u32` that hold their own element numbers, saved and loaded
//! by plans alone.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, FileId, Layout, Placement};
use dcp_core::plan::{GlobalPlan, LeafKind, LoadPlan, ReadKind, SavePlan, StateIndex, StateLeaf};
use dcp_core::{CheckpointMetadata, DType, Key, Region};

/// The element numbers of a region of a tensor.
pub fn elements(region: &Region, shape: &[u64]) -> Vec<u32> {
    let runs = region.runs_in(shape);
    runs.flat_map(|(at, n)| at..at + n).map(|n| u32::try_from(n).unwrap()).collect()
}

pub fn tensor(fqn: &str, shape: &[u64], sharded: bool, regions: Vec<Region>) -> StateLeaf {
    let kind = LeafKind::Tensor { dtype: DType::UInt32, shape: shape.into(), sharded, regions };
    StateLeaf { fqn: fqn.into(), path: None, kind }
}

pub fn whole(shape: &[u64]) -> Region {
    Region::full(shape).unwrap()
}

pub fn object(fqn: &str, byte_len: u64) -> StateLeaf {
    StateLeaf { fqn: fqn.into(), path: None, kind: LeafKind::Object { byte_len } }
}

pub fn index(leaves: Vec<StateLeaf>) -> StateIndex {
    StateIndex { leaves }
}

/// Stored chunks by entry and position.
pub type Stored = BTreeMap<(u32, u32), Vec<u32>>;

/// Writes what the plan selects, and places it one item after the other in one raw file.
pub fn save(locals: &[SavePlan], global: &mut GlobalPlan) -> Stored {
    let mut stored = Stored::new();
    for (local, selected) in locals.iter().zip(&global.selections) {
        for selected in selected {
            let item = local.item(selected.item as usize).unwrap();
            let data = match &item.key.tensor {
                Some(spec) => {
                    elements(&Region::new(item.offsets, item.sizes).unwrap(), &spec.shape)
                }
                None => vec![7],
            };
            let (fqn, _) = global.metadata.at(selected.entry as usize).unwrap();
            assert_eq!(*fqn, item.key.fqn);
            let twice = stored.insert((selected.entry, selected.chunk), data);
            assert!(twice.is_none(), "{fqn} is written twice");
        }
    }
    place_all(&mut global.metadata);
    stored
}

/// Gives every chunk and object a place in one raw file.
pub fn place_all(metadata: &mut CheckpointMetadata) {
    metadata.intern_file(&Key::new("data").unwrap());
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap();
    let file = FileId::from_index(0).unwrap();
    let mut byte_offset = 0;
    for position in 0..metadata.len() {
        let mut next = |byte_len| {
            byte_offset += byte_len;
            Placement { file, encoding, byte_offset: byte_offset - byte_len, byte_len }
        };
        match metadata.at_mut(position).unwrap().1 {
            Entry::Tensor(tensor) => {
                let element = tensor.dtype.size() as u64;
                for chunk in 0..tensor.chunks.len() {
                    let region = tensor.chunks.get(chunk).unwrap().region().unwrap();
                    tensor.chunks.place(chunk, next(region.volume() * element));
                }
            }
            Entry::Object(object) => object.placement = Some(next(1)),
            other => panic!("{other:?}"),
        }
    }
}

/// Reads by plan into the shards of `wanted`; elements that are not read are `None`, and none is
/// read twice.
pub fn load(
    plan: &LoadPlan,
    wanted: &StateIndex,
    metadata: &CheckpointMetadata,
    stored: &Stored,
) -> BTreeMap<(Arc<str>, usize), Vec<Option<u32>>> {
    let mut memory = BTreeMap::new();
    for leaf in &wanted.leaves {
        if let LeafKind::Tensor { regions, .. } = &leaf.kind {
            for (shard, region) in regions.iter().enumerate() {
                let len = usize::try_from(region.volume()).unwrap();
                memory.insert((Arc::clone(&leaf.fqn), shard), vec![None; len]);
            }
        }
    }
    for item in &plan.items {
        let leaf = &wanted.leaves[item.leaf as usize];
        let ReadKind::Tensor { chunk, shard, region } = &item.kind else { continue };
        let LeafKind::Tensor { regions, .. } = &leaf.kind else { panic!("{leaf:?}") };
        let tensor = metadata.at(item.entry as usize).unwrap().1.as_tensor().unwrap();
        let source = tensor.chunks.get(*chunk as usize).unwrap().region().unwrap();
        let data = &stored[&(item.entry, *chunk)];
        let target = &regions[*shard as usize];
        let memory = memory.get_mut(&(Arc::clone(&leaf.fqn), *shard as usize)).unwrap();
        let from = region.relative_to(source.offsets()).unwrap();
        let to = region.relative_to(target.offsets()).unwrap();
        let positions = |runs: dcp_core::region::Runs| runs.flat_map(|(at, n)| at..at + n);
        for (from, to) in
            positions(from.runs_in(source.sizes())).zip(positions(to.runs_in(target.sizes())))
        {
            let slot = &mut memory[usize::try_from(to).unwrap()];
            assert!(slot.is_none(), "{} is read twice", leaf.fqn);
            *slot = Some(data[usize::try_from(from).unwrap()]);
        }
    }
    memory
}
