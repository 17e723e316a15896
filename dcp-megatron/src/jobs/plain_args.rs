//! Arguments in a form that every Megatron-Core since 0.6 loads.
//!
//! `common.pt` holds the arguments of the run, with enumerations and classes of the version that
//! saved it. A version that lacks one of them fails in `torch.load`: up to 0.13 because the import
//! fails, since 0.14 because the class is not in `megatron/core/safe_globals.py`. No version reads
//! these arguments back from a checkpoint, so plain values serve as well.

use dcp_core::{DType, FormatError, Value};
use dcp_formats::torch_save::replace_classes;
use dcp_jobs::write::ReplacedClass;

/// The entry of the common state that holds the arguments.
const ARGS: &str = "args";

/// The common state with arguments that every version since 0.6 loads, and what was replaced;
/// `None` where all of them do already.
pub(crate) fn with_plain_args(
    common: &Value,
) -> Result<Option<(Value, Vec<ReplacedClass>)>, FormatError> {
    let replaced = replace_classes(common, ARGS, &is_in_every_version)?;
    Ok(replaced
        .map(|(common, objects)| (common, objects.into_iter().map(ReplacedClass::from).collect())))
}

/// Whether 0.6 can import it, and every `torch.load` with `weights_only=True` since 0.14 allows it.
fn is_in_every_version(module: &str, name: &str) -> bool {
    match module {
        "argparse" => name == "Namespace",
        "types" => name == "SimpleNamespace",
        "pathlib" => name == "PosixPath",
        "collections" => name == "OrderedDict",
        "torch" => {
            matches!(name, "Size" | "device" | "Tensor")
                || name.ends_with("Storage")
                || name.parse::<DType>().is_ok()
        }
        "torch._utils" => name.starts_with("_rebuild_"),
        "megatron.core.enums" => name == "ModelType",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_some_versions_are_not_in_every_version() {
        for (module, name) in [
            ("argparse", "Namespace"),
            ("torch", "bfloat16"),
            ("torch", "Size"),
            ("megatron.core.enums", "ModelType"),
        ] {
            assert!(is_in_every_version(module, name), "{module}.{name}");
        }
        for (module, name) in [
            // Since 0.11.
            ("megatron.core.transformer.enums", "AttnBackend"),
            // Since 0.16, and since 0.18.
            ("megatron.core.transformer.enums", "CudaGraphScope"),
            ("megatron.core.transformer.enums", "InferenceCudaGraphScope"),
            // Not among the safe classes of 0.14 and 0.15.
            ("signal", "Signals"),
            ("torch", "compile"),
            ("builtins", "eval"),
        ] {
            assert!(!is_in_every_version(module, name), "{module}.{name}");
        }
    }
}
