//! Clauses on objects that one holder at a time replaces.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::StorageErrorKind;
use dcp_core::storage::PutMode;
use futures_util::future::join_all;
use tokio::sync::Barrier;

use super::subject::{Subject, expect_kind, pattern};
use crate::case::{Failure, Outcome, ensure, runtime};

super::clauses![
    a_claim_replaces_an_object_or_makes_it if Claims,
    a_claim_is_no_object if Claims,
    of_two_claims_the_first_to_replace_wins if Claims,
    a_claim_that_is_dropped_holds_nobody_up if Claims,
    claims_of_several_objects_go_side_by_side if Claims,
    no_replacement_of_concurrent_holders_is_lost if Claims,
];

async fn a_claim_replaces_an_object_or_makes_it(subject: Subject) -> Outcome {
    let there = subject.create("there", &pattern(1, 5000)).await?;
    for key in [there, subject.key("new folder/object")?] {
        let claim = subject.storage.claim(&key).await?;
        for len in [9000, 10, 0, 5000] {
            let new = pattern(2, len);
            claim.replace(new.clone().into()).await?;
            subject.holds(&key, &new).await?;
        }
    }
    Ok(())
}

async fn a_claim_is_no_object(subject: Subject) -> Outcome {
    let key = subject.key("object")?;
    let claim = subject.storage.claim(&key).await?;
    subject.is_absent(&key).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.is_empty(), "a claim is listed: {listed:?}");
    claim.replace(pattern(3, 10).into()).await?;
    let listed = subject.list(None).await?;
    ensure!(listed.len() == 1, "there is more than the object: {listed:?}");
    Ok(())
}

/// `Err` where the storage refuses the second of two claims.
async fn second(
    subject: &Subject,
    key: &dcp_core::Key,
) -> Result<Result<Arc<dyn dcp_core::storage::Claim>, ()>, Failure> {
    match subject.storage.claim(key).await {
        Err(error) if error.kind() == StorageErrorKind::Conflict => Ok(Err(())),
        claim => Ok(Ok(claim?)),
    }
}

async fn of_two_claims_the_first_to_replace_wins(subject: Subject) -> Outcome {
    for (name, there) in [("absent", false), ("there", true)] {
        let key = subject.key(name)?;
        if there {
            subject.create(name, &pattern(4, 100)).await?;
        }
        for first_replaces in [true, false] {
            let first = subject.storage.claim(&key).await?;
            let (winner, loser) = match (second(&subject, &key).await?, first_replaces) {
                (Err(()), _) => (first, None),
                (Ok(second), true) => (first, Some(second)),
                (Ok(second), false) => (second, Some(first)),
            };
            // The same bytes again may be the same version.
            let new = pattern(if first_replaces { 5 } else { 7 }, 300);
            winner.replace(new.clone().into()).await?;
            if let Some(loser) = loser {
                let late = loser.replace(pattern(6, 300).into()).await;
                expect_kind(late, StorageErrorKind::Conflict, "the later one of two claims")?;
            }
            subject.holds(&key, &new).await?;
        }
    }
    Ok(())
}

async fn a_claim_that_is_dropped_holds_nobody_up(subject: Subject) -> Outcome {
    let key = subject.key("object")?;
    for seed in 0..4 {
        let claim = subject.storage.claim(&key).await?;
        if seed % 2 == 0 {
            claim.replace(pattern(seed, 50).into()).await?;
        }
    }
    let claim = subject.storage.claim(&key).await?;
    claim.replace(pattern(7, 60).into()).await?;
    drop(claim);
    let new = pattern(8, 70);
    subject.storage.put(&key, new.clone().into(), PutMode::Overwrite).await?;
    subject.holds(&key, &new).await
}

async fn claims_of_several_objects_go_side_by_side(subject: Subject) -> Outcome {
    let mut claims = Vec::new();
    for name in ["a", "b", "folder/a", ".metadata"] {
        let key = subject.key(name)?;
        claims.push((subject.storage.claim(&key).await?, key));
    }
    for (seed, (claim, key)) in (0..).zip(&claims) {
        claim.replace(pattern(seed, 20).into()).await?;
        subject.holds(key, &pattern(seed, 20)).await?;
    }
    Ok(())
}

async fn no_replacement_of_concurrent_holders_is_lost(subject: Subject) -> Outcome {
    const HOLDERS: usize = 12;
    let key = subject.create("counter", &Bytes::from_static(b"0")).await?;
    // No holder starts before all are there: a slow machine would run them one by one.
    let start = Arc::new(Barrier::new(HOLDERS));
    let holders = (0..HOLDERS).map(|_| {
        let (subject, key, start) = (subject.clone(), key.clone(), Arc::clone(&start));
        runtime().spawn(async move {
            start.wait().await;
            let Ok(claim) = second(&subject, &key).await? else { return Ok(0) };
            let read = subject.whole(&key).await?;
            let count: usize = std::str::from_utf8(&read)?.parse()?;
            tokio::task::yield_now().await;
            match claim.replace((count + 1).to_string().into_bytes().into()).await {
                Ok(_) => Ok::<_, Failure>(1),
                late => expect_kind(late, StorageErrorKind::Conflict, "a lost race").map(|()| 0),
            }
        })
    });
    let mut replaced: usize = 0;
    for holder in join_all(holders.collect::<Vec<_>>()).await {
        replaced += holder??;
    }
    ensure!(replaced > 0, "no writer replaced the object");
    subject.holds(&key, &replaced.to_string().into()).await
}
