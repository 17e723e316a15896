//! A small model in whatever layout.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{Collective, DType, HostMemory, Region, TensorView, Value};
use dcp_megatron::sharded::{
    LocalNonpersistentObject, LocalTensor, ShardedObject, ShardedStateDict, ShardedTensor,
    ShardedValue, swiglu,
};
pub(crate) use dcp_testing::memory;

/// Runs `main` on `n` threads that form a group, and returns their results in rank order.
pub(crate) fn on_ranks<T: Send>(
    n: u32,
    main: impl Fn(u64, Arc<dyn Collective>) -> T + Sync,
) -> Vec<T> {
    dcp_testing::on_ranks(n, |rank, collective| main(rank.into(), collective))
}

/// The bytes of a box of an `i32` tensor of `shape` whose elements count up from `first`.
pub(crate) fn elements(shape: &[u64], region: &Region, first: i32) -> Vec<u8> {
    region
        .runs_in(shape)
        .flat_map(|(at, len)| at..at + len)
        .flat_map(|at| (first + i32::try_from(at).unwrap()).to_le_bytes())
        .collect()
}

pub(crate) fn view(shape: &[u64], bytes: Vec<u8>) -> TensorView {
    TensorView::contiguous(HostMemory::from_vec(bytes), DType::Int32, shape, 0).unwrap()
}

/// Where a rank is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) tp: (u64, u64),
    pub(crate) pp: (u64, u64),
    pub(crate) dp: u64,
}

impl Layout {
    pub(crate) fn of(rank: u64, tp: u64, pp: u64) -> Self {
        Self { tp: (rank % tp, tp), pp: (rank / tp % pp, pp), dp: rank / tp / pp }
    }
}

const LAYERS: u64 = 4;
const HIDDEN: u64 = 8;
const FFN: u64 = 16;
const VOCAB: u64 = 16;

/// What a leaf holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fill {
    /// The elements of the model.
    Model,
    /// Memory of zeros.
    Zeros,
    /// No memory.
    Nothing,
}

struct Leaves {
    at: Layout,
    fill: Fill,
}

impl Leaves {
    fn local(&self, shape: &[u64], bytes: impl FnOnce() -> Vec<u8>) -> LocalTensor {
        match self.fill {
            Fill::Model => view(shape, bytes()).into(),
            Fill::Zeros => view(shape, vec![0; bytes().len()]).into(),
            Fill::Nothing => LocalTensor::described(DType::Int32, shape),
        }
    }

    /// A tensor cut on a global axis by tensor parallelism, at a layer.
    fn cut(&self, key: &str, whole: &[u64], axis: usize, layer: u64, first: i32) -> ShardedTensor {
        let (rank, ranks) = self.at.tp;
        let mut sizes = whole.to_vec();
        sizes[axis] /= ranks;
        sizes[0] = 1;
        let mut offsets = vec![0; whole.len()];
        (offsets[0], offsets[axis]) = (layer, rank * sizes[axis]);
        let region = Region::new(offsets, sizes.clone()).unwrap();
        let local = self.local(&sizes[1..], || elements(whole, &region, first));
        ShardedTensor::from_rank_offsets(key, local)
            .prepended_axes(1)
            .offset(0, layer, whole[0])
            .offset(axis, rank, ranks)
            .replica_id([0, 0, self.at.dp])
            .build()
            .unwrap()
    }

    /// Gate and up of this rank, one behind the other.
    fn gated(&self, layer: u64) -> ShardedValue {
        let whole = [LAYERS, 2 * FFN, HIDDEN];
        let (rank, ranks) = self.at.tp;
        let rows = FFN / ranks;
        let half =
            |from: u64| Region::new([layer, from + rank * rows, 0], [1, rows, HIDDEN]).unwrap();
        let local = self.local(&[2 * rows, HIDDEN], || {
            [elements(&whole, &half(0), 1000), elements(&whole, &half(FFN), 1000)].concat()
        });
        let shard = ShardedTensor::from_rank_offsets("decoder.layers.mlp.linear_fc1.weight", local)
            .prepended_axes(1)
            .offset(0, layer, LAYERS)
            .offset(1, rank, ranks)
            .replica_id([0, 0, self.at.dp])
            .build()
            .unwrap();
        swiglu(&shard).unwrap().into()
    }

    fn embedding(&self) -> ShardedTensor {
        let (rank, ranks) = self.at.tp;
        let rows = VOCAB / ranks;
        let region = Region::new([rank * rows, 0], [rows, HIDDEN]).unwrap();
        let local = self.local(&[rows, HIDDEN], || elements(&[VOCAB, HIDDEN], &region, 90_000));
        ShardedTensor::from_rank_offsets("embedding.weight", local)
            .offset(0, rank, ranks)
            .replica_id([u64::from(self.at.pp.0 > 0), 0, self.at.dp])
            .build()
            .unwrap()
    }
}

/// The model of a rank: stacked layers, a gated unit, an embedding that first and last stage have,
/// a norm that all tensor-parallel ranks have, and common and local state.
pub(crate) fn model(at: Layout, fill: Fill) -> ShardedStateDict {
    let leaves = Leaves { at, fill };
    let per_stage = LAYERS / at.pp.1;
    let layers: Vec<ShardedValue> = (at.pp.0 * per_stage..(at.pp.0 + 1) * per_stage)
        .map(|layer| {
            let qkv = [LAYERS, 3 * HIDDEN, HIDDEN];
            let fc2 = [LAYERS, HIDDEN, FFN];
            ShardedStateDict::from([
                ("qkv", leaves.cut("decoder.layers.qkv.weight", &qkv, 1, layer, 10_000).into()),
                ("fc1", leaves.gated(layer)),
                ("fc2", leaves.cut("decoder.layers.fc2.weight", &fc2, 2, layer, 20_000).into()),
            ])
            .into()
        })
        .collect();
    let mut model = ShardedStateDict::from([("layers", layers)]);
    if at.pp.0 == 0 || at.pp.0 + 1 == at.pp.1 {
        model.insert("embedding", leaves.embedding());
    }
    if at.pp.0 + 1 == at.pp.1 {
        let whole = Region::full([HIDDEN]).unwrap();
        let norm = leaves.local(&[HIDDEN], || elements(&[HIDDEN], &whole, 70_000));
        let norm = ShardedTensor::from_rank_offsets("final_norm", norm)
            .replica_id([0, at.tp.0, at.dp])
            .build()
            .unwrap();
        model.insert("norm", norm);
    }
    let mut state = ShardedStateDict::from([("model", model)]);
    let args = Dict::from([("num_layers", 4), ("hidden_size", 8)]);
    state.insert("args", Value::Dict(args));
    state.insert("iteration", Value::Int(7));
    state.insert("handle", LocalNonpersistentObject("of this process".into()));
    state
}

/// The state of each rank's random generator.
pub(crate) fn rng(at: Layout) -> ShardedObject {
    let data = Value::Int(i64::try_from(100 * at.pp.0 + at.tp.0).unwrap());
    ShardedObject::new("rng_state", data, [at.pp.1, at.tp.1], [at.pp.0, at.tp.0])
        .unwrap()
        .with_replica_id(at.dp)
}

/// The local tensors of a loaded or saved state, by path.
pub(crate) fn tensors(state: &Dict) -> Vec<(String, Vec<u8>)> {
    fn gather(value: &Value, path: String, found: &mut Vec<(String, Vec<u8>)>) {
        match value {
            Value::Dict(dict) => dict.iter().for_each(|(key, value)| {
                gather(value, format!("{path}.{}", key.as_str().unwrap()), found);
            }),
            Value::List(items) => items.iter().enumerate().for_each(|(index, value)| {
                gather(value, format!("{path}.{index}"), found);
            }),
            Value::Tensor(tensor) => found.push((path, tensor.to_vec().unwrap())),
            _ => {}
        }
    }
    let mut found = Vec::new();
    gather(&state.clone().into(), String::new(), &mut found);
    found.sort();
    found
}

/// What a model holds: the tensors in its leaves and factories.
pub(crate) fn held(state: &ShardedStateDict) -> Vec<(String, Vec<u8>)> {
    fn gather(value: &ShardedValue, path: String, found: &mut Vec<(String, Vec<u8>)>) {
        let bytes = |view: &TensorView| view.payload().unwrap().to_bytes().to_vec();
        match value {
            ShardedValue::Dict(dict) => dict.iter().for_each(|(key, value)| {
                gather(value, format!("{path}.{}", key.as_str().unwrap()), found);
            }),
            ShardedValue::List(items) => items.iter().enumerate().for_each(|(index, value)| {
                gather(value, format!("{path}.{index}"), found);
            }),
            ShardedValue::Tensor(tensor) => found.push((path, bytes(tensor.data().unwrap()))),
            ShardedValue::Factory(factory) => {
                found.push((path, bytes(factory.parts().local.data().unwrap())));
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    gather(&state.clone().into(), String::new(), &mut found);
    found.sort();
    found
}
