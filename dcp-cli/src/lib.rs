#![doc = include_str!("../README.md")]

mod cli;
mod command;
mod command_line;
#[cfg(test)]
mod every_operation;
mod failure;
mod interrupt;
mod options;
mod output;
mod plugins;
mod ranks;
mod session;
mod terms;
mod threads;

pub use command_line::CommandLine;
pub use terms::of_command;
