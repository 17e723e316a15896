//! The main job on a real checkpoint: a model that PyTorch 2.15 trained with FSDP2 on two ranks
//! is inspected, resharded to three ranks, converted to safetensors, and every tensor compared
//! with what PyTorch says it holds.
//!
//! ```sh
//! cargo run -p distcp --example quickstart
//! ```
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp::Storage;
use dcp::convert::jobs::inspect::KeySummary;
use dcp::convert::jobs::verify::VerifyReport;
use dcp::convert::{self, JobOptions, Source, Target};
use dcp::core::Key;
use dcp::core::registry::Access;
use dcp::formats::dcp::{DcpReader, DcpWriter};
use dcp::formats::safetensors::{Header, PREFIX_LEN, header_len};

const RANKS: u32 = 3;

fn main() -> Result<(), Box<dyn Error>> {
    dcp::block_on(tour())?
}

async fn tour() -> Result<(), Box<dyn Error>> {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/pytorch/fsdp2_adam_2r");
    let scratch = Scratch::new()?;
    let jobs = JobOptions::default();

    println!("1. Inspect what PyTorch 2.15 saved with FSDP2 on two ranks\n");
    let saved = open(&bundled, Access::Read).await?;
    let source = source(&saved);
    let summary = convert::inspect(&source, &jobs, |_| true).await?;
    for (fqn, key) in &summary.keys {
        match key {
            KeySummary::Tensor(tensor) => println!(
                "   {fqn:<44} {:<8} {:<9} {}",
                tensor.dtype,
                format!("{:?}", tensor.shape),
                match tensor.chunks.len() {
                    1 => "in one chunk".to_owned(),
                    chunks => format!("in {chunks} chunks"),
                }
            ),
            KeySummary::Object { value } => println!("   {fqn:<44} = {}", short(value)),
            _ => {}
        }
    }

    println!("\n2. Reshard it to {RANKS} ranks, and verify every byte of the result\n");
    let resharded = open(&scratch.0.join("resharded"), Access::Write).await?;
    let writer = DcpWriter::new(Arc::clone(&resharded));
    let report = convert::reshard(&source, &writer, RANKS, &jobs).await?;
    for (file, bytes) in &report.files {
        println!("   {file:<44} {bytes} bytes");
    }
    let resharded = self::source(&resharded);
    let verdict: VerifyReport = convert::verify(&resharded, true, &jobs).await?;
    println!("   verify --deep: {} problems", verdict.problems.len());

    println!("\n3. Convert the result to one safetensors file\n");
    let output = open(&scratch.0, Access::Write).await?;
    let target = Target::new(output, Key::new("model.safetensors")?);
    let report = convert::to_safetensors(&resharded, &target, &jobs).await?;
    println!("   model.safetensors: {} tensors, {} bytes", report.tensors, report.bytes);

    println!("\n4. Compare with what PyTorch says the checkpoint holds\n");
    let ours = Image::read(&scratch.0.join("model.safetensors"))?;
    let theirs = Image::read(&bundled.join("expected.safetensors"))?;
    let names = |image: &Image| {
        image.header.tensors().map(|(name, _)| name.to_string()).collect::<BTreeSet<_>>()
    };
    if !verdict.problems.is_empty() || names(&ours) != names(&theirs) {
        return Err("the result is damaged".into());
    }
    for name in names(&theirs) {
        if ours.tensor(&name) != theirs.tensor(&name) {
            return Err(format!("{name} differs").into());
        }
    }
    println!("   all {} tensors are equal, bit for bit", report.tensors);
    Ok(())
}

async fn open(path: &Path, access: Access) -> Result<Arc<dyn Storage>, Box<dyn Error>> {
    let url = path.to_str().ok_or("a path that is not UTF-8")?;
    Ok(dcp::default_storages().open(url, access).await?)
}

fn source(storage: &Arc<dyn Storage>) -> Source {
    Source::new(Arc::clone(storage), Arc::new(DcpReader::new(Arc::clone(storage))))
}

fn short(value: &impl ToString) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

/// A safetensors file in memory.
struct Image {
    header: Header,
    data: Vec<u8>,
}

impl Image {
    fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let bytes = std::fs::read(path)?;
        let start = (PREFIX_LEN + header_len(&bytes, bytes.len() as u64)?) as usize;
        let data = bytes[start..].to_vec();
        let header = Header::parse(&bytes[PREFIX_LEN as usize..start], data.len() as u64)?;
        Ok(Self { header, data })
    }

    /// Element type, shape and bytes.
    fn tensor(&self, name: &str) -> Option<(dcp::DType, &[u64], &[u8])> {
        let info = self.header.get(name)?;
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        Some((info.dtype, &info.shape, &self.data[range]))
    }
}

/// A temporary folder.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("dcp-quickstart-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort: the system cleans its temporary folder anyway.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
