//! A rank's part of the state in any parallel layout, as a trainer describes it.

use std::fmt;
use std::ops::Range;

use dcp::core::value::Dict;
use dcp::megatron::sharded::{
    LocalNonpersistentObject, LocalTensor, ObjectKey, ShardedObject, ShardedStateDict,
    ShardedTensor, ShardedValue, swiglu,
};
use dcp::{DType, Region, Tensor, Value};
use serde_json::Value as Json;

use super::description::{Description, Spec};
use crate::{Result, expected, layout};

/// Where a rank is, and how the state is laid out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    tensor: (u64, u64),
    pipeline: (u64, u64),
    data: u64,
    world: (u64, u64),
}

/// What is to be found at a path of a loaded state.
pub(super) enum Wanted {
    Tensor { dtype: DType, shape: Vec<u64>, bytes: Vec<u8> },
    Object(Json),
    Value(Value),
}

/// A rank's part of the state, and what a load is to put in each place of it.
pub(super) struct Part {
    pub(super) state: ShardedStateDict,
    pub(super) wanted: Vec<(Vec<Value>, Wanted)>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TP{} PP{} on {} ranks", self.tensor.1, self.pipeline.1, self.world.1)
    }
}

impl Place {
    /// A rank's coordinates in a layout such as `2x4`, TP by PP; what is left over is data
    /// parallelism.
    pub(super) fn new(layout: &str, rank: u32, world: u32) -> Result<Self> {
        let (tensor, pipeline) = layout.split_once('x').ok_or("a layout is TPxPP")?;
        let (tensor, pipeline): (u64, u64) = (tensor.parse()?, pipeline.parse()?);
        let (rank, world) = (u64::from(rank), u64::from(world));
        Ok(Self {
            tensor: (rank % tensor, tensor),
            pipeline: (rank / tensor % pipeline, pipeline),
            data: rank / tensor / pipeline,
            world: (rank, world),
        })
    }

    /// Whether every rank holds all.
    pub(super) fn is_replicated(&self) -> bool {
        self.tensor.1 == 1 && self.pipeline.1 == 1
    }
}

/// Where on the prepended axes a rank's tensor is, and what its place in the state is called.
#[derive(Default)]
struct Position {
    prepended: Vec<u64>,
    layer: u64,
    expert: u64,
}

impl Description {
    /// A rank's part: filled, or without memory to be loaded. Objects that exist once per rank are
    /// left out when they are not `tied`.
    pub(super) fn part(&self, place: Place, fill: bool, tied: bool) -> Result<Part> {
        let layers = self.layers()?;
        let (stage, stages) = place.pipeline;
        let mine = stage * layers / stages..(stage + 1) * layers / stages;
        let mut part = Part { state: ShardedStateDict::new(), wanted: Vec::new() };
        for spec in self.list("tensors") {
            let spec = Spec::new(spec)?;
            match spec.stage.as_str() {
                "layers" => {
                    for layer in mine.clone() {
                        spec.layer(&mut part, place, layer, layer - mine.start, fill)?;
                    }
                }
                "uneven" => spec.uneven(&mut part, place, fill)?,
                stage_name => {
                    let last = stages - 1;
                    let copy = match stage_name {
                        "last" if stage == last => 0,
                        "tied" if stage == 0 => 0,
                        "tied" if stage == last => 1,
                        "all" => stage,
                        _ => continue,
                    };
                    spec.put(&mut part, place, &Position::default(), copy, fill)?;
                }
            }
        }
        for spec in self.list("objects") {
            self.objects(&mut part, spec, place, mine.clone(), fill, tied)?;
        }
        let local = Value::from(format!("rank {}", place.world.0));
        let path = vec![Value::from("optimizer"), Value::from("local")];
        let object = LocalNonpersistentObject(local.clone());
        part.put(path, object.into(), Wanted::Value(local))?;
        Ok(part)
    }
}

impl Spec {
    /// The tensors of one layer: one, or one for each expert of this rank.
    fn layer(&self, part: &mut Part, place: Place, layer: u64, local: u64, fill: bool) -> Result {
        if self.prepended < 2 {
            let at = Position { prepended: vec![layer], layer: local, expert: 0 };
            return self.put(part, place, &at, 0, fill);
        }
        let experts = self.shape.get(1).copied().unwrap_or(0);
        let (rank, ranks) = place.tensor;
        let mine = rank * experts / ranks..(rank + 1) * experts / ranks;
        for expert in mine.clone() {
            let at = Position {
                prepended: vec![layer, expert],
                layer: local,
                expert: expert - mine.start,
            };
            self.put(part, place, &at, 0, fill)?;
        }
        Ok(())
    }

    /// One tensor of an even grid.
    fn put(&self, part: &mut Part, place: Place, at: &Position, copy: u64, fill: bool) -> Result {
        // The parts of the whole that are here: two halves of a gated unit, otherwise one.
        let halves = if self.gated { 2 } else { 1 };
        let (rank, ranks) = if self.cut.is_some() { place.tensor } else { (0, 1) };
        let axis = self.cut.unwrap_or(self.prepended);
        let mut bytes = Vec::new();
        let mut shape = self.shape.get(self.prepended..).unwrap_or_default().to_vec();
        for half in 0..halves {
            let (mut offsets, mut sizes) = (vec![0; self.shape.len()], self.shape.clone());
            for (number, position) in at.prepended.iter().enumerate() {
                if let (Some(offset), Some(size)) = (offsets.get_mut(number), sizes.get_mut(number))
                {
                    (*offset, *size) = (*position, 1);
                }
            }
            if let (Some(offset), Some(size)) = (offsets.get_mut(axis), sizes.get_mut(axis)) {
                *size /= halves * ranks;
                *offset = (rank + half * ranks) * *size;
                if let Some(local) = shape.get_mut(axis - self.prepended) {
                    *local = *size * halves;
                }
            }
            let region = Region::new(offsets, sizes)?;
            // The halves lie one behind the other along the first axis, so their bytes do.
            bytes.extend(layout::bytes_of(self.dtype, &self.shape, &self.whole, &region)?);
        }
        let local = self.local(&shape, &bytes, fill)?;
        let replica = [copy, if self.cut.is_some() { 0 } else { place.tensor.0 }, place.data];
        // An expert is on one tensor-parallel rank only.
        let replica = if self.prepended == 2 { [0, 0, place.data] } else { replica };
        let mut shard = ShardedTensor::from_rank_offsets(self.key.as_str(), local)
            .prepended_axes(self.prepended)
            .replica_id(replica);
        for (number, position) in at.prepended.iter().enumerate() {
            shard = shard.offset(number, *position, self.shape.get(number).copied().unwrap_or(0));
        }
        if self.cut.is_some() {
            shard = shard.offset(axis, rank, ranks);
        }
        let shard = shard.build()?;
        let value: ShardedValue = if self.gated { swiglu(&shard)?.into() } else { shard.into() };
        part.put(self.path_at(at), value, Wanted::Tensor { dtype: self.dtype, shape, bytes })
    }

    /// Rows in parts that grow from rank to rank, on no grid.
    fn uneven(&self, part: &mut Part, place: Place, fill: bool) -> Result {
        let rows = self.shape.first().copied().unwrap_or(0);
        let parts = place.world.1 * self.pieces;
        let bound = |number: u64| rows * number * (number + 1) / (parts * (parts + 1));
        let mut pieces = Vec::new();
        for number in place.world.0 * self.pieces..(place.world.0 + 1) * self.pieces {
            let (mut offsets, mut sizes) = (vec![0; self.shape.len()], self.shape.clone());
            if let (Some(offset), Some(size)) = (offsets.first_mut(), sizes.first_mut()) {
                (*offset, *size) = (bound(number), bound(number + 1) - bound(number));
            }
            let region = Region::new(offsets.clone(), sizes.clone())?;
            let bytes = layout::bytes_of(self.dtype, &self.shape, &self.whole, &region)?;
            let local = self.local(&sizes, &bytes, fill)?;
            let shard =
                ShardedTensor::builder(self.key.as_str(), local, self.shape.clone(), offsets);
            let wanted = Wanted::Tensor { dtype: self.dtype, shape: sizes, bytes };
            pieces.push((ShardedValue::from(shard.build()?), wanted));
        }
        let path = self.path_at(&Position::default());
        if self.pieces == 1 {
            return pieces
                .into_iter()
                .try_for_each(|(piece, wanted)| part.put(path.clone(), piece, wanted));
        }
        let (pieces, wanted): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
        part.set(&path, ShardedValue::List(pieces))?;
        for (number, wanted) in wanted.into_iter().enumerate() {
            let mut path = path.clone();
            path.push(Value::Int(i64::try_from(number)?));
            part.wanted.push((path, wanted));
        }
        Ok(())
    }

    fn local(&self, shape: &[u64], bytes: &[u8], fill: bool) -> Result<LocalTensor> {
        if !fill {
            return Ok(LocalTensor::described(self.dtype, shape.to_vec()));
        }
        Ok(LocalTensor::from(Tensor::replicated(self.dtype, shape.to_vec(), bytes.to_vec())?))
    }

    fn path_at(&self, at: &Position) -> Vec<Value> {
        self.path.iter().map(|name| named(name, at)).collect()
    }
}

fn named(name: &str, at: &Position) -> Value {
    if name == "{number}" {
        return Value::Int(i64::try_from(at.layer).unwrap_or_default());
    }
    let name = name.replace("{layer}", &at.layer.to_string());
    Value::from(name.replace("{expert}", &at.expert.to_string()))
}

impl Description {
    /// The objects of one name that a rank has.
    fn objects(
        &self,
        part: &mut Part,
        spec: &Json,
        place: Place,
        mine: Range<u64>,
        fill: bool,
        tied: bool,
    ) -> Result {
        let key = expected::text(spec, "key")?;
        let (grid, offsets, replica) = match expected::text(spec, "place")? {
            "layers" => {
                let offsets: Vec<Vec<u64>> = mine.clone().map(|layer| vec![layer]).collect();
                (vec![self.layers()?], offsets, [0, place.tensor.0, place.data])
            }
            _ if !tied => return Ok(()),
            "pp_tp" => {
                let grid = vec![place.pipeline.1, place.tensor.1];
                (grid, vec![vec![place.pipeline.0, place.tensor.0]], [0, 0, place.data])
            }
            _ => (vec![place.world.1], vec![vec![place.world.0]], [0, 0, 0]),
        };
        let path = spec.get("path").and_then(Json::as_array).into_iter().flatten();
        let path: Vec<&str> = path.filter_map(Json::as_str).collect();
        for offset in offsets {
            let layer = offset.first().copied().unwrap_or(0).saturating_sub(mine.start);
            let at = ObjectKey::new(key, grid.clone(), offset.clone())?;
            let value = self.object(&at)?;
            let object = if fill {
                ShardedObject::new(key, expected::value_of(&value)?, grid.clone(), offset)?
            } else {
                ShardedObject::request(at)
            };
            let position = Position { layer, ..Position::default() };
            let path = path.iter().map(|name| named(name, &position)).collect();
            part.put(path, object.with_replica_id(replica).into(), Wanted::Object(value))?;
        }
        Ok(())
    }
}

impl Part {
    fn put(&mut self, path: Vec<Value>, value: ShardedValue, wanted: Wanted) -> Result {
        self.set(&path, value)?;
        self.wanted.push((path, wanted));
        Ok(())
    }

    fn set(&mut self, path: &[Value], value: ShardedValue) -> Result {
        fn set(into: &mut ShardedStateDict, path: &[Value], value: ShardedValue) -> Result {
            let [name, rest @ ..] = path else { return Err("an empty path".into()) };
            if rest.is_empty() {
                return match into.insert(name.clone(), value) {
                    None => Ok(()),
                    Some(_) => Err(format!("{name:?} twice").into()),
                };
            }
            match into.get_or_insert_with(name.clone(), ShardedStateDict::new) {
                ShardedValue::Dict(inner) => set(inner, rest, value),
                _ => Err(format!("{name:?} is not a dict").into()),
            }
        }
        set(&mut self.state, path, value)
    }

    /// Adds plain values beside the sharded ones.
    pub(super) fn merge(&mut self, common: &Dict) -> Result {
        fn merge(into: &mut ShardedStateDict, common: &Dict) -> Result {
            for (name, value) in common.iter() {
                match (into.get_value_mut(name), value) {
                    (None, _) => drop(into.insert(name.clone(), value.clone())),
                    (Some(ShardedValue::Dict(inner)), Value::Dict(value)) => merge(inner, value)?,
                    _ => return Err(format!("{name:?} twice").into()),
                }
            }
            Ok(())
        }
        merge(&mut self.state, common)
    }
}
