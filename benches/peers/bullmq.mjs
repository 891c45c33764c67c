// BullMQ with its limiter: takes jobs from Redis or PostgreSQL, makes one HTTP call for each, and prints what the
// provider saw as JSON.
//
// The counterpart of `sluicegate-bench path` and `bench fidelity`. It has no ledger and guarantees no window (README.md).
import http from 'node:http';
import { createRequire } from 'node:module';
import { parseArgs } from 'node:util';

const { values } = parseArgs({
  options: {
    modules: { type: 'string' }, // directory with node_modules
    redis: { type: 'string' }, // port on loopback; or
    postgres: { type: 'string' }, // postgres://…
    provider: { type: 'string' }, // http://127.0.0.1:PORT
    jobs: { type: 'string' },
    seconds: { type: 'string' },
    max: { type: 'string' }, // calls per window
    window: { type: 'string' }, // ms
    workers: { type: 'string', default: '1' },
    concurrency: { type: 'string', default: '64' },
  },
});
const number = (name) => {
  const value = Number(values[name]);
  if (!Number.isFinite(value) || value <= 0) throw new Error(`--${name} must be a number above 0`);
  return value;
};
const require = createRequire(`${values.modules}/`);
const { Queue, Worker, createPostgresBackend } = require('bullmq');
const [jobs, workers, concurrency] = ['jobs', 'workers', 'concurrency'].map(number);
const provider = new URL(values.provider);
const connection = values.postgres
  ? { connectionString: values.postgres, migrate: true }
  : { host: '127.0.0.1', port: number('redis'), maxRetriesPerRequest: null };
const backend = values.postgres ? createPostgresBackend : undefined;
const name = `peer-${process.pid}`;
const agent = new http.Agent({ keepAlive: true, maxSockets: concurrency * workers });

// Makes one request; the body is read to the end, so that the connection can be used again.
function call(method, path, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const options = { agent, method, path, hostname: provider.hostname, port: provider.port, headers };
    const request = http.request(options, (response) => {
      const chunks = [];
      response.on('data', (chunk) => chunks.push(chunk));
      response.on('end', () => resolve({ status: response.statusCode, text: Buffer.concat(chunks).toString() }));
      response.on('error', reject);
    });
    request.on('error', reject);
    request.end(body);
  });
}

async function charge(job) {
  const id = `${name}-${job.data.number}`;
  const body = JSON.stringify({ id, amount: 100 + (job.data.number % 900), currency: 'EUR' });
  const headers = {
    'content-type': 'application/json',
    'content-length': Buffer.byteLength(body),
    'idempotency-key': id,
  };
  const { status } = await call('POST', '/charges', body, headers);
  if (status !== 200) throw new Error(`answered ${status}`);
}

const queue = new Queue(name, { connection }, backend);
for (let from = 0; from < jobs; from += 1000) {
  const some = Array.from({ length: Math.min(1000, jobs - from) }, (_, at) => ({
    name: 'charge',
    data: { number: from + at },
    opts: { removeOnComplete: true },
  }));
  await queue.addBulk(some);
}

const limiter = { max: number('max'), duration: number('window') };
let completed = 0;
let failed = 0;
const crew = Array.from({ length: workers }, () => new Worker(name, charge, { connection, concurrency, limiter }, backend));
await new Promise((resolve) => {
  const over = setTimeout(resolve, number('seconds') * 1000);
  for (const worker of crew) {
    worker.on('error', (error) => console.error(error.message));
    worker.on('failed', () => (failed += 1));
    worker.on('completed', () => {
      completed += 1;
      if (completed + failed === jobs) {
        clearTimeout(over);
        resolve();
      }
    });
  }
});
// Read before the workers are closed: calls that end later do not count.
const report = JSON.parse((await call('GET', '/_report')).text);
await Promise.all(crew.map((worker) => worker.close(true)));
await queue.obliterate({ force: true });
await queue.close();
agent.destroy();

const span = (report.last_arrival_us - report.first_arrival_us) / 1e6;
console.log(
  JSON.stringify({
    peer: 'bullmq',
    version: require('bullmq/package.json').version,
    completed,
    failed,
    requests: report.requests,
    jobs_per_second: span > 0 ? report.requests / span : 0,
    largest_in_any_window: report.limits[0]?.largest ?? 0,
    breaches: report.limits[0]?.breaches ?? 0,
  }),
);
process.exit(0);
