//! Summarizes a Megatron-Core checkpoint: format, parallel layout, layers, objects.

use dcp_core::metadata::Entry;
use dcp_core::{CheckpointMetadata, Value};
use dcp_formats::dcp::DcpReader;
use dcp_jobs::element::{JsonLimits, value_json};
use indexmap::IndexMap;
use serde::Serialize;

use crate::disk::common_state::{COMMON_STATE, CommonPlace};
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronCheckpoint, StoredFormat};
use crate::optimizer::OptimizerFormat;
use crate::partition::Observed;

/// A description of a Megatron-Core checkpoint. Serialized, it is `megatron` in the output of `dcp
/// inspect --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Description {
    /// The format, by the name that `--ckpt-format` has for it: `torch_dist`, `zarr`, `torch`; or
    /// `plug-in`.
    pub format: &'static str,
    /// The place of the common state: a file, or the key of an object.
    pub common_place: &'static str,
    /// The versions of Megatron-Core that may have written it.
    pub written_by: String,
    /// The versions of Megatron-Core that read it.
    pub read_by: &'static str,
    /// The iteration that was saved.
    pub iteration: Option<u64>,
    /// Samples that were trained on.
    pub consumed_samples: Option<u64>,
    /// The parallel sizes that the stored chunks and files show.
    pub parallel: ParallelSizes,
    /// The parallel sizes in the arguments, where they differ from `parallel`: they are those of
    /// the run that saved the model, and stay as they are when it is resharded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel_of_args: Option<ParallelSizes>,
    /// The stacks of layers, by the name that their keys begin with, such as `decoder.layers`.
    pub layers: IndexMap<String, Layers>,
    /// The form of the optimizer's state: a name of Megatron's or a description, `none` without.
    pub optimizer: &'static str,
    /// Sharded objects by key.
    pub objects: IndexMap<String, ObjectGroup>,
    /// Keys of the common state, and what kind of value each is.
    pub common: IndexMap<String, String>,
    /// The content metadata that Megatron-Core (0.13 and later) stores, as `value_json` writes it.
    pub content_metadata: Option<serde_json::Value>,
    /// Oddities that did not keep the checkpoint from being opened.
    pub warnings: Vec<String>,
}

/// The parallel sizes of a model; `None` where one is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ParallelSizes {
    /// Ranks that share a layer's matrices.
    pub tensor: Option<u64>,
    /// Ranks that share the layers.
    pub pipeline: Option<u64>,
    /// Ranks that share the experts.
    pub expert: Option<u64>,
    /// Ranks that share each expert.
    pub expert_tensor: Option<u64>,
    /// Ranks that share a sequence.
    pub context: Option<u64>,
    /// Ranks that train on other data.
    pub data: Option<u64>,
    /// All ranks.
    pub world: Option<u64>,
}

/// A stack of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Layers {
    /// The number of layers.
    pub count: u64,
    /// The axis that the layers are on in tensors that hold all of them; `None` where every
    /// layer has tensors of its own.
    pub axis: Option<usize>,
    /// Tensors of the stack.
    pub tensors: usize,
}

/// The sharded objects of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ObjectGroup {
    /// The grid that they lie on: objects per axis.
    pub grid: Vec<u64>,
    /// The number of objects that are stored.
    pub stored: u64,
    /// Bytes that they take, where known.
    pub bytes: u64,
}

impl MegatronCheckpoint {
    /// Describes the checkpoint. Reads no tensor and no object.
    ///
    /// # Errors
    ///
    /// When the index cannot be read.
    pub async fn describe(&self) -> Result<Description, MegatronError> {
        let metadata = self.source().metadata().await?;
        let objects = objects(&metadata);
        let flattened = match self.raw().and_then(|raw| raw.extension::<DcpReader>()) {
            Some(reader) => !reader.original_shapes().await?.is_empty(),
            None => false,
        };
        let args = self.args();
        let of_common = |name: &str| {
            let number = self.common().get(name).and_then(Value::as_int);
            number.and_then(|number| u64::try_from(number).ok())
        };
        let content = self.content_metadata();
        let (format, common_place) = match self.format() {
            StoredFormat::TorchDist { common: CommonPlace::File } => ("torch_dist", "common.pt"),
            StoredFormat::TorchDist { common: CommonPlace::Inside } => {
                ("torch_dist", "common_state/shard_0_1")
            }
            StoredFormat::TorchDist { common: CommonPlace::Nowhere } => {
                ("torch_dist", "neither place")
            }
            StoredFormat::Zarr => ("zarr", "common.pt"),
            StoredFormat::Legacy { .. } => ("torch", "model_optim_rng.pt"),
            StoredFormat::Plugged { .. } => ("plug-in", "where the plug-in has it"),
        };
        let (written_by, read_by) = ages(self.format(), content.is_some(), flattened);
        let common = self.common().iter().map(|(key, value)| {
            let name = match key {
                Value::Str(name) => name.to_string(),
                Value::Int(number) => number.to_string(),
                other => other.kind().to_owned(),
            };
            (name, value.kind().to_owned())
        });
        let optimizer = match self.optimizer_files() {
            [] => OptimizerFormat::of(&metadata, self.common()),
            _ => OptimizerFormat::LegacyDistributed,
        };
        let (parallel, parallel_of_args) = self.parallel(&metadata, &objects);
        Ok(Description {
            format,
            common_place,
            written_by,
            read_by,
            iteration: of_common("iteration")
                .or_else(|| args.as_ref().and_then(|args| args.iteration())),
            consumed_samples: args.as_ref().and_then(|args| args.consumed_train_samples()),
            parallel,
            parallel_of_args,
            layers: layers(&metadata),
            optimizer: optimizer.name(),
            objects,
            common: common.collect(),
            content_metadata: content
                .map(|dict| value_json(&Value::Dict(dict.clone()), &JsonLimits::default())),
            warnings: self.warnings().to_vec(),
        })
    }

    /// The sizes that the files have, completed by the arguments where these agree, and what the
    /// arguments say where they do not.
    fn parallel(
        &self,
        metadata: &CheckpointMetadata,
        objects: &IndexMap<String, ObjectGroup>,
    ) -> (ParallelSizes, Option<ParallelSizes>) {
        let stored = match *self.format() {
            StoredFormat::Legacy { tp, pp, ep } => Observed {
                tensor: Some(tp.into()),
                pipeline: Some(pp.into()),
                expert: Some(ep.into()),
                expert_tensor: None,
            },
            _ => Observed::of(metadata),
        };
        let said = self.sizes_of_args();
        let differ = |stored: Option<u64>, said: Option<u64>| match (stored, said) {
            (Some(stored), Some(said)) => stored != said,
            _ => false,
        };
        if differ(stored.tensor, said.tensor)
            || differ(stored.pipeline, said.pipeline)
            || differ(stored.expert, said.expert)
            || differ(stored.expert_tensor, said.expert_tensor)
        {
            let Observed { tensor, pipeline, expert, expert_tensor } = stored;
            let none = ParallelSizes::default();
            return (ParallelSizes { tensor, pipeline, expert, expert_tensor, ..none }, Some(said));
        }
        let grid = |key: &str| objects.get(key).map(|group| &*group.grid);
        let (of_pipeline, of_tensor) = match grid("rng_state") {
            Some([pipeline, tensor]) => (Some(*pipeline), Some(*tensor)),
            _ => (None, None),
        };
        let tensor = said.tensor.or(stored.tensor).or(of_tensor);
        let pipeline = said.pipeline.or(stored.pipeline).or(of_pipeline);
        let world = said.world.or_else(|| match grid("rerun_state_machine_state") {
            Some([world]) => Some(*world),
            _ => None,
        });
        let data = said.data.or_else(|| {
            let context = said.context.unwrap_or(1);
            let model = tensor?.checked_mul(pipeline?)?.checked_mul(context)?;
            let world = world?;
            (model > 0 && world % model == 0).then(|| world / model)
        });
        let expert = said.expert.or(stored.expert);
        let expert_tensor = stored.expert_tensor.or(said.expert_tensor);
        (ParallelSizes { tensor, pipeline, expert, expert_tensor, data, world, ..said }, None)
    }

    fn sizes_of_args(&self) -> ParallelSizes {
        let args = self.args();
        let of = |name: &str| args.as_ref().and_then(|args| args.count(name));
        let tensor = of("tensor_model_parallel_size");
        // Only where there are experts does it mean anything; it is the tensor parallel size
        // unless given.
        let experts = of("num_experts");
        ParallelSizes {
            tensor,
            pipeline: of("pipeline_model_parallel_size"),
            expert: of("expert_model_parallel_size"),
            expert_tensor: experts.and(of("expert_tensor_parallel_size").or(tensor)),
            context: of("context_parallel_size"),
            data: of("data_parallel_size"),
            world: of("world_size"),
        }
    }
}

/// Returns the versions that may have written a checkpoint, and those that read it.
fn ages(format: &StoredFormat, content: bool, flattened: bool) -> (String, &'static str) {
    match format {
        StoredFormat::TorchDist { common: CommonPlace::Inside } => {
            ("0.19 or later".to_owned(), "0.19 and later")
        }
        StoredFormat::TorchDist { common: CommonPlace::File } => {
            // Content metadata came with 0.13; flattened tensors were noted from 0.8 to 0.15.
            let first = if content {
                "0.13"
            } else if flattened {
                "0.8"
            } else {
                "0.6"
            };
            let last = if flattened { "0.15" } else { "0.18" };
            let read = match flattened {
                true => "up to 0.15 all of it; 0.16 and later the weights, not the optimizer",
                false => "0.6 and later",
            };
            (format!("{first} to {last}"), read)
        }
        StoredFormat::TorchDist { common: CommonPlace::Nowhere } => {
            ("not known without a common state".to_owned(), "none, as it is damaged")
        }
        StoredFormat::Zarr => ("up to 0.15".to_owned(), "up to 0.15"),
        StoredFormat::Legacy { .. } => {
            ("any version".to_owned(), "every version, by as many ranks as saved it")
        }
        StoredFormat::Plugged { backend } => {
            (format!("with a plug-in for {backend}"), "those with the plug-in")
        }
    }
}

/// The sharded objects by key, in the order of the checkpoint.
fn objects(metadata: &CheckpointMetadata) -> IndexMap<String, ObjectGroup> {
    let mut groups: IndexMap<String, ObjectGroup> = IndexMap::new();
    for (fqn, entry) in metadata.iter() {
        let Entry::Object(object) = entry else { continue };
        let Some((key, grid)) = object_key(fqn).filter(|_| &**fqn != COMMON_STATE) else {
            continue;
        };
        let group = groups.entry(key.to_owned()).or_default();
        group.grid = grid;
        group.stored += 1;
        let bytes = object.placement.map_or(0, |placement| placement.byte_len);
        group.bytes = group.bytes.saturating_add(bytes);
    }
    groups
}

/// The key and the grid of a sharded object, by its unique key `key/shard_<offsets>_<grid>`.
/// Grids of Megatron-Core before 0.8 may lack the last axis.
#[must_use]
pub fn object_key(unique: &str) -> Option<(&str, Vec<u64>)> {
    let (key, shard) = unique.split_once("/shard_")?;
    let (offsets, grid) = shard.split_once('_')?;
    let numbers = |text: &str| -> Option<Vec<u64>> {
        text.split('.').filter(|part| !part.is_empty()).map(|part| part.parse().ok()).collect()
    };
    numbers(offsets)?;
    Some((key, numbers(grid)?))
}

/// The stacks of layers among the model's keys.
fn layers(metadata: &CheckpointMetadata) -> IndexMap<String, Layers> {
    let mut stacks: IndexMap<String, Layers> = IndexMap::new();
    for (fqn, entry) in metadata.iter() {
        let Entry::Tensor(tensor) = entry else { continue };
        if fqn.starts_with("optimizer.") || fqn.starts_with("chained_") {
            continue;
        }
        let Some((stack, rest)) = fqn.split_once(".layers.") else { continue };
        let first = rest.split('.').next().and_then(|step| step.parse::<u64>().ok());
        let (count, axis) = match (first, tensor.shape.first()) {
            (Some(number), _) => (number.saturating_add(1), None),
            (None, Some(count)) => (*count, Some(0)),
            (None, None) => continue,
        };
        let layers = stacks.entry(format!("{stack}.layers")).or_default();
        layers.count = layers.count.max(count);
        layers.axis = axis;
        layers.tensors += 1;
    }
    stacks
}

#[cfg(test)]
mod tests {
    use dcp_core::metadata::TensorEntry;
    use dcp_core::{DType, Dims};

    use super::*;

    #[test]
    fn unique_keys_are_taken_apart() {
        for (unique, expected) in [
            ("rng_state/shard_0.1_1.2", Some(("rng_state", vec![1, 2]))),
            ("a.b._extra_state/shard_3_24", Some(("a.b._extra_state", vec![24]))),
            ("common_state", None),
            ("x/shard_a_1", None),
            ("x/shard_1", None),
        ] {
            assert_eq!(object_key(unique), expected, "{unique}");
        }
    }

    #[test]
    fn layers_are_counted_on_their_axis_or_by_their_numbers() {
        let mut metadata = CheckpointMetadata::new();
        let mut add = |name: &str, shape: &[u64]| {
            let shape = shape.iter().copied().collect::<Dims>();
            metadata.insert(name, Entry::Tensor(TensorEntry::new(DType::Float32, shape)));
        };
        add("decoder.layers.mlp.linear_fc1.weight", &[24, 8, 8]);
        add("decoder.layers.mlp.linear_fc2.weight", &[24, 8, 8]);
        add("optimizer.state.param.decoder.layers.mlp.linear_fc1.weight", &[24, 8, 8]);
        add("mtp.layers.0.enorm.weight", &[8]);
        add("mtp.layers.1.enorm.weight", &[8]);
        let found = layers(&metadata);
        let decoder = Layers { count: 24, axis: Some(0), tensors: 2 };
        let mtp = Layers { count: 2, axis: None, tensors: 2 };
        let wanted: IndexMap<String, Layers> =
            [("decoder.layers".to_owned(), decoder), ("mtp.layers".to_owned(), mtp)].into();
        assert_eq!(found, wanted);
    }
}
