//! `dcp arch`.

use clap::Args;
use dcp::mapping::Mapping;
use serde_json::json;

use crate::failure::Failure;
use crate::output::Output;
use crate::output::style::{columns, left};

/// List the model families that convert between Megatron-Core and Hugging Face, or print one.
///
/// torchtitan_llama converts between torchtitan and Hugging Face.
///
/// A family is a mapping, declared in TOML: which tensor of Megatron-Core is which tensors of
/// transformers, and what is done between them. Print one, change it, and pass the file to
/// `dcp convert --arch`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp arch
  dcp arch llama > my.toml
  dcp convert run/iter_0001000 my-model --to hf --arch my.toml

What a mapping may say is in dcp-mapping/README.md.")]
pub(crate) struct Arch {
    /// The family whose mapping is printed: its name, or a model_type of transformers.
    family: Option<String>,

    /// Print the list as JSON.
    #[arg(long, conflicts_with = "family")]
    json: bool,
}

pub(crate) fn arch(args: &Arch, out: &Output) -> Result<(), Failure> {
    if let Some(family) = &args.family {
        let mapping = Mapping::builtin(family)?;
        return out.write_own(Mapping::declaration(mapping.name()).unwrap_or_default());
    }
    let mut families = Mapping::builtins()?;
    families.extend(Mapping::of_programs()?);
    if args.json {
        let one = |family: &Mapping| {
            json!({
                "name": family.name(),
                "title": family.title(),
                "model_types": family.model_types(),
            })
        };
        return out.json(&families.iter().map(one).collect::<Vec<_>>());
    }
    let width = families.iter().map(|family| columns(family.name())).max().unwrap_or(0);
    let lines = families.iter().map(|family| {
        format!("{}  {}\n", out.style.bold(&left(family.name(), width)), family.title())
    });
    out.write(&lines.collect::<String>())
}
