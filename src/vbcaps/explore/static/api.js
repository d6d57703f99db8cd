// Requests to the server that this page came from.

/** The server said no, in a sentence that may be shown. */
export class Refused extends Error {}

/** The server did not answer at all. */
export class Silent extends Error {}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Silent("The server does not answer. Is `vbcaps explore` still running? The page asks again every two seconds.");
  }
  const answer = await response.json().catch(() => null);
  if (response.ok && answer) return answer;
  throw new Refused(sentence(answer?.error ?? `the server answered with error ${response.status} and did not say why`));
}

/** Write words as a sentence. */
function sentence(words) {
  return words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

export const get = (path) => ask(path);

export function post(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

export function send(path, blob) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: blob });
}

/** Requests of one kind: one at a time, and after it the newest wish; those between are dropped. */
export class Lane {
  /**
   * @param request  a function from a wish's body to the promise of an answer
   * @param show     is called with (answer, wish); the answer is null where the last one still holds
   * @param fail     is called with (error, wish)
   */
  constructor(request, show, fail) {
    Object.assign(this, { request, show, fail, next: null, busy: false, key: null });
  }

  /** Wish for an answer: {key, body, sequence}; wishes with the same key have the same answer. */
  want(wish) {
    this.next = wish;
    if (!this.busy) this.run();
  }

  async run() {
    this.busy = true;
    while (this.next) {
      const wish = this.next;
      this.next = null;
      try {
        const answer = wish.key === this.key ? null : await this.request(wish.body);
        this.key = wish.key;
        this.show(answer, wish);
      } catch (error) {
        this.key = null;
        this.fail(error, wish);
      }
    }
    this.busy = false;
  }
}
