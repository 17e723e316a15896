//! The main job on a real checkpoint: a model that PyTorch 2.15 trained with FSDP2 on two ranks
//! is inspected, resharded to three ranks, converted to safetensors, and every tensor compared
//! with the value that PyTorch recorded.
//!
//! ```sh
//! cargo run -p distcp --example quickstart
//! ```
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    dcp::block_on(tour())?
}

async fn tour() -> Result<(), Box<dyn Error>> {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/pytorch/fsdp2_adam_2r");
    let scratch = tempfile::tempdir()?;
    let place = |name: &str| scratch.path().join(name).display().to_string();

    println!("1. Inspect what PyTorch 2.15 saved with FSDP2 on two ranks\n");
    let saved = dcp::open(bundled).await?;
    for (fqn, key) in &saved.inspect().run().await?.summary.keys {
        println!("   {fqn:<44} {key}");
    }

    println!("\n2. Reshard it to 3 ranks, and verify every byte of the result\n");
    let resharded = saved.reshard(place("resharded")).ranks(3).run().await?;
    for (file, bytes) in &resharded.report.files {
        println!("   {file:<44} {bytes} bytes");
    }
    let resharded = dcp::open(&place("resharded")).await?;
    let verified = resharded.verify().deep(true).run().await?;
    println!("   verify --deep: {} problems", verified.problems.len());

    println!("\n3. Convert the result to one safetensors file\n");
    let model = resharded.convert(place("model.safetensors")).run().await?.report;
    println!("   model.safetensors: {} tensors, {} bytes", model.tensors, model.bytes);

    println!("\n4. Compare with the values that PyTorch recorded\n");
    let ours = dcp::open(&place("model.safetensors")).await?.load().run().await?;
    let theirs = dcp::open(&format!("{bundled}/expected.safetensors")).await?.load().run().await?;
    for (fqn, value) in theirs.iter() {
        let is_equal = fqn.as_str().and_then(|fqn| ours.get(fqn)).is_some_and(|v| v.same(value));
        is_equal.then_some(()).ok_or_else(|| format!("{fqn:?} differs"))?;
    }
    if !verified.ok || ours.len() != theirs.len() {
        return Err("the result is damaged".into());
    }
    println!("   all {} tensors are equal, bit for bit", theirs.len());
    Ok(())
}
