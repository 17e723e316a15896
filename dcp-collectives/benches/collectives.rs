//! Latency of the collectives over loopback TCP, with threads as ranks.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use dcp_collectives::{TcpCollective, TcpConfig};
use dcp_core::{Collective, CollectiveError};

const WORLD_SIZE: u32 = 64;
const MESSAGE: usize = 100 << 10;

fn group(world_size: u32) -> Vec<TcpCollective> {
    let connect = || {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let mut listener = Some(listener);
        let ranks = (0..world_size).map(|rank| {
            let config = TcpConfig::new(rank, world_size, "127.0.0.1", port);
            let config = match listener.take() {
                Some(listener) => config.listener(listener),
                None => config,
            };
            thread::spawn(move || config.connect())
        });
        let ranks = ranks.collect::<Vec<_>>();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|_| unreachable!("connect does not panic")))
            .collect::<Result<Vec<_>, CollectiveError>>()
            .map_err(std::io::Error::other)
    };
    connect().unwrap_or_else(|error: std::io::Error| panic!("no group: {error}"))
}

/// The time that `rounds` rounds take on the last rank to finish.
fn time(
    group: &[TcpCollective],
    rounds: u64,
    round: impl Fn(&TcpCollective) -> Result<(), CollectiveError> + Sync,
) -> Duration {
    let run = |rank: &TcpCollective| {
        rank.barrier()?;
        let begin = Instant::now();
        for _ in 0..rounds {
            round(rank)?;
        }
        Ok::<_, CollectiveError>(begin.elapsed())
    };
    thread::scope(|scope| {
        let ranks = group.iter().map(|rank| scope.spawn(move || run(rank))).collect::<Vec<_>>();
        ranks
            .into_iter()
            .map(|rank| match rank.join() {
                Ok(Ok(time)) => time,
                Ok(Err(error)) => panic!("{error}"),
                Err(_) => panic!("a rank panicked"),
            })
            .max()
            .unwrap_or_default()
    })
}

fn collectives(criterion: &mut Criterion) {
    let ranks = group(WORLD_SIZE);
    let mut benches = criterion.benchmark_group("tcp, 64 ranks");
    benches.sample_size(20);
    benches.bench_function("barrier", |bencher| {
        bencher.iter_custom(|rounds| time(&ranks, rounds, Collective::barrier));
    });
    benches.bench_function("gather and scatter 100 KiB", |bencher| {
        let message = Bytes::from(vec![7; MESSAGE]);
        bencher.iter_custom(|rounds| {
            time(&ranks, rounds, |rank| {
                let all = rank.gather(0, message.clone())?;
                rank.scatter(0, all).map(drop)
            })
        });
    });
    benches.finish();
    drop(ranks);

    let pair = group(2);
    let mut benches = criterion.benchmark_group("tcp, 2 ranks");
    benches.bench_function("barrier", |bencher| {
        bencher.iter_custom(|rounds| time(&pair, rounds, Collective::barrier));
    });
    benches.bench_function("broadcast 64 MiB", |bencher| {
        let message = Bytes::from(vec![7; 64 << 20]);
        bencher.iter_custom(|rounds| {
            time(&pair, rounds, |rank| {
                let mine = (rank.rank() == 0).then(|| message.clone());
                rank.broadcast(0, mine).map(drop)
            })
        });
    });
    benches.finish();
}

criterion_group!(benches, collectives);
criterion_main!(benches);
