//! Builds of the command with plug-ins.

use std::process::ExitCode;
use std::sync::Arc;

use dcp::core::Storage;
use dcp_cli::CommandLine;
use dcp_conformance::MemoryStorage;

use crate::support::fixtures;

#[test]
fn a_registered_scheme_is_written_and_read_by_every_command() {
    let storage = Arc::new(MemoryStorage::new());
    let run = |args: &[&str]| {
        let storage = Arc::clone(&storage);
        CommandLine::new()
            .storages(move |storages| {
                let storage = Arc::clone(&storage);
                storages.register("tape", move |_| Ok(Arc::clone(&storage) as Arc<dyn Storage>));
            })
            .run_with([&["dcp", "--quiet"], args].concat())
    };
    let source = fixtures().join("fsdp2_adam_2r");
    let source = source.to_str().unwrap();
    assert_eq!(run(&["copy", source, "tape://7/run"]), ExitCode::SUCCESS);
    assert_eq!(run(&["verify", "--deep", "tape://7/run"]), ExitCode::SUCCESS);
    assert_eq!(run(&["diff", source, "tape://7/run"]), ExitCode::SUCCESS);
    assert_eq!(run(&["inspect", "disk://7/run"]), ExitCode::from(2));
    assert_eq!(run(&["--no-such-option"]), ExitCode::from(2));
    assert_eq!(run(&["--version"]), ExitCode::SUCCESS);
}
