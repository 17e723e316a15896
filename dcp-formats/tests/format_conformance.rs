//! The suite for formats on those of this crate.

#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_conformance::format::{BoxError, Sample, SampleTensor, Subject, trials};
use dcp_conformance::run;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::{OwnThreads, PutMode};
use dcp_core::{CheckpointError, DType, HostMemory, Payload, Storage, Tensor, Value};
use dcp_formats::dcp::{DcpFormat, DcpWriter};
use dcp_formats::hf::HuggingFaceFormat;
use dcp_formats::torch_save::{
    TorchSaveContent, TorchSaveFormat, TorchSaveItem, TorchSaveOptions, TorchSavePlan,
};
use dcp_testing::key;
use serde_json::{Map, json};

fn main() -> ExitCode {
    let dcp = Subject::with_writer(Arc::new(DcpFormat), |storage, overwrite| {
        Arc::new(DcpWriter::builder(storage).overwrite(overwrite).build())
    });
    let safetensors = Subject::filled(Arc::new(HuggingFaceFormat), one_file).without_objects();
    let shards = Subject::filled(Arc::new(HuggingFaceFormat), two_files).without_objects();
    let torch_save = Subject::filled(Arc::new(TorchSaveFormat), torch_file);
    let subjects = [
        ("dcp", dcp.checksums()),
        ("safetensors", safetensors),
        ("safetensors_shards", shards),
        ("torch_save", torch_save.in_file(key("model.pt")).checksums()),
    ];
    run(subjects.into_iter().flat_map(|(name, subject)| trials(name, subject)).collect())
}

async fn put(storage: &dyn Storage, name: &str, bytes: Vec<u8>) -> Result<(), BoxError> {
    storage.put(&key(name), bytes.into(), PutMode::Create).await?;
    Ok(())
}

/// A file of safetensors.
fn safetensors(tensors: &[SampleTensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors {
        let dtype = match tensor.dtype {
            DType::Float64 => "F64",
            DType::Float32 => "F32",
            DType::Float16 => "F16",
            DType::BFloat16 => "BF16",
            DType::Int64 => "I64",
            DType::UInt8 => "U8",
            other => unreachable!("{other:?} is in no sample"),
        };
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        let offsets = [begin, data.len()];
        let entry = json!({"dtype": dtype, "shape": &tensor.shape[..], "data_offsets": offsets});
        header.insert(tensor.fqn.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

async fn one_file(storage: Arc<dyn Storage>, sample: Sample) -> Result<Sample, BoxError> {
    put(&*storage, "model.safetensors", safetensors(&sample.tensors)).await?;
    Ok(sample)
}

async fn two_files(storage: Arc<dyn Storage>, sample: Sample) -> Result<Sample, BoxError> {
    let (first, second) = sample.tensors.split_at(3);
    let mut weights = Map::new();
    for (number, tensors) in [(1, first), (2, second)] {
        let file = format!("model-{number:05}-of-00002.safetensors");
        weights.extend(tensors.iter().map(|tensor| (tensor.fqn.clone(), json!(file))));
        put(&*storage, &file, safetensors(tensors)).await?;
    }
    let index = json!({"metadata": {}, "weight_map": weights});
    put(&*storage, "model.safetensors.index.json", index.to_string().into_bytes()).await?;
    Ok(sample)
}

/// All of it is in the plan.
#[derive(Debug)]
struct NoData;

#[async_trait]
impl DataSource for NoData {
    async fn resolve(&self, _: usize, _: Range<u64>) -> Result<Payload, CheckpointError> {
        Ok(Payload::default())
    }

    fn segment_bytes(&self) -> u64 {
        u64::MAX
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

async fn torch_file(storage: Arc<dyn Storage>, mut sample: Sample) -> Result<Sample, BoxError> {
    // What is in a dict has names of its own.
    sample.objects.retain(|(_, value)| value.as_dict().is_none());
    let mut items = Vec::new();
    let mut push = |name: &str, value| {
        let content = TorchSaveContent::Object(value);
        items.push(TorchSaveItem { name: name.into(), path: None, content });
    };
    for tensor in &sample.tensors {
        let memory = HostMemory::from_vec(tensor.bytes.to_vec());
        let whole = Tensor::replicated(tensor.dtype, tensor.shape.clone(), memory)?;
        push(&tensor.fqn, Value::Tensor(whole));
    }
    for (fqn, value) in &sample.objects {
        push(fqn, value.clone());
    }
    let plan = TorchSavePlan::new(&key("model.pt"), &items, &TorchSaveOptions::default())?;
    plan.write(&*storage, Arc::new(NoData), None).await?;
    Ok(sample)
}
