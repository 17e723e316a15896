//! What Python would run when it loads an object is named, and written only on request.

use std::fs;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::DType;
use dcp_core::storage::PutMode;
use dcp_core::storage::StorageExt as _;
use dcp_core::value::{Dict, Global, Object};
use dcp_core::{Storage, Tensor, Value};
use dcp_formats::dcp::DcpWriter;
use dcp_formats::torch_save::{TorchSaveOptions, encode_value};
use dcp_jobs::convert::{to_safetensors, to_torch_save};
use dcp_jobs::inspect::inspect;
use dcp_jobs::integrity::ProblemKind;
use dcp_jobs::reshard::reshard;
use dcp_jobs::verify::{VerifyReport, verify};
use dcp_jobs::write::{ConversionReport, Target};
use dcp_jobs::{JobError, JobOptions, Source};
use dcp_planner::KeyFilter;
use dcp_testing::key;

use crate::support::{block_on, fixture};

fn call(module: &str, name: &str) -> Value {
    let args = vec![Value::Str("touch /tmp/pwned".into())];
    Value::Object(Box::new(Object::new(Global::new(module, name), args)))
}

/// A file of `torch.save` with a tensor, and an object that Python makes by calling something.
fn file(module: &str, name: &str) -> Source {
    let tensor = Tensor::replicated(DType::UInt8, [2_u64], vec![1, 2]).unwrap();
    let hooks = Value::List(vec![Value::Int(1), call(module, name)]);
    let state: Value = Dict::from([
        ("w".to_owned(), Value::Tensor(tensor)),
        ("extra".to_owned(), Dict::from([("hooks".to_owned(), hooks)]).into()),
    ])
    .into();
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let bytes = encode_value(&state, "in").unwrap();
    block_on(storage.put(&key("in.pt"), bytes.into(), PutMode::Create)).unwrap();
    Source::torch_save(storage, key("in.pt"))
}

fn admitting(name: &str) -> JobOptions {
    JobOptions::default().with_callables(KeyFilter::any_of([name]))
}

fn to_dcp(source: &Source, options: &JobOptions) -> Result<(Source, ConversionReport), JobError> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = DcpWriter::new(Arc::clone(&storage));
    let done = block_on(reshard(source, &writer, 2, options));
    match done {
        Ok(report) => Ok((Source::dcp(storage, false), report)),
        Err(error) => {
            assert!(!block_on(storage.contains(&key(".metadata"))).unwrap());
            Err(error)
        }
    }
}

fn to_pt(source: &Source, options: &JobOptions) -> Result<(Source, ConversionReport), JobError> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let target = Target::new(Arc::clone(&storage), key("out.pt"));
    let done = block_on(to_torch_save(source, &target, TorchSaveOptions::default(), options));
    match done {
        Ok(report) => Ok((Source::torch_save(storage, key("out.pt")), report)),
        Err(error) => {
            assert!(!block_on(storage.contains(&key("out.pt"))).unwrap());
            Err(error)
        }
    }
}

fn verified(source: &Source) -> VerifyReport {
    block_on(verify(source, true, &JobOptions::default())).unwrap()
}

#[test]
fn commands_in_objects_are_named_everywhere_and_not_written() {
    let file = file("posix", "system");
    let (sharded, report) = to_dcp(&file, &admitting("posix.system")).unwrap();
    assert_eq!(report.callables.len(), 1, "{report:?}");
    let (again, _) = to_pt(&file, &admitting("posix")).unwrap();
    for (source, place) in [
        (&file, "the file at \"extra.hooks.1\""),
        (&again, "the file at \"extra.hooks.1\""),
        (&sharded, "\"extra.hooks\" at \"1\""),
    ] {
        let what = format!("posix.system in {place}");
        for error in [
            to_dcp(source, &JobOptions::default()).unwrap_err(),
            to_pt(source, &JobOptions::default()).unwrap_err(),
            to_pt(source, &admitting("posix.systems")).unwrap_err(),
        ] {
            let JobError::Callables { found } = &error else { panic!("{error:?}") };
            assert!(found.iter().all(|one| one.dangerous) && found.len() == 1, "{found:?}");
            assert!(error.to_string().contains("posix.system in "), "{error}");
        }
        let report = verified(source);
        assert!(!report.ok);
        let [problem] = &*report.problems else { panic!("{report:?}") };
        assert_eq!(problem.kind, ProblemKind::Callable);
        assert!(problem.message.contains(&what), "{what} is not in {problem:?}");
        let summary = block_on(inspect(source, &JobOptions::default(), |_| true)).unwrap();
        assert_eq!(summary.callables.len(), 1, "{:?}", summary.callables);
        // Tensors alone run nothing.
        let storage = Arc::new(MemoryStorage::new());
        let target = Target::new(storage, key("out.safetensors"));
        block_on(to_safetensors(source, &target, &JobOptions::default())).unwrap();
    }
}

#[test]
fn classes_of_which_nothing_is_known_are_no_damage_and_have_to_be_admitted() {
    let file = file("my.project", "Hook");
    let report = verified(&file);
    assert!(report.ok && report.notes.iter().any(|note| note.contains("my.project.Hook")));
    let error = to_dcp(&file, &JobOptions::default()).unwrap_err();
    let JobError::Callables { found } = error else { panic!("{error:?}") };
    assert!(!found[0].dangerous);
    for pattern in ["my.project.Hook", "my", "*.Hook", "*"] {
        to_dcp(&file, &admitting(pattern)).unwrap();
    }
}

#[test]
fn what_real_checkpoints_hold_is_known() {
    let folder = dcp_testing::fixture("pytorch");
    let mut looked_at = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Ok(source) = block_on(Source::open(&fixture(&name), true)) else { continue };
        let summary = block_on(inspect(&source, &JobOptions::default(), |_| true)).unwrap();
        assert_eq!(summary.callables, [], "{name}");
        looked_at += 1;
    }
    assert!(looked_at > 30, "{looked_at}");
}
