//! The suite for formats on that of Megatron-Core.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::format::{Subject, trials};
use dcp_conformance::run;
use dcp_core::Value;
use dcp_core::value::Dict;
use dcp_megatron::{MegatronCoreFormat, MegatronForm, MegatronWriter};

/// A format whose writer puts the common state where `form` says.
fn subject(form: MegatronForm) -> Subject {
    Subject::with_writer(Arc::new(MegatronCoreFormat), move |storage, overwrite| {
        let mut common = Dict::new();
        common.insert("iteration", 10);
        let writer = MegatronWriter::builder(storage).common(Value::Dict(common)).form(form);
        Arc::new(writer.overwrite(overwrite).build())
    })
    .checksums()
    .own_entry("common_state")
}

fn main() -> ExitCode {
    let subjects = [
        ("common_file", subject(MegatronForm::CommonFile)),
        ("common_inside", subject(MegatronForm::CommonInside)),
    ];
    run(subjects.into_iter().flat_map(|(name, subject)| trials(name, subject)).collect())
}
