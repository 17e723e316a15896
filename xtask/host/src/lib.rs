//! The machine and the checkout, for the commands of xtask: other programs, ports, virtual environments with
//! PyTorch, emulators of object stores, and the output of cargo and git.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for command-line tools")]

pub mod emulators;
pub mod port;
pub mod process;
pub mod venv;
pub mod workspace;

use std::error::Error;

/// The result of every command.
pub type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;
