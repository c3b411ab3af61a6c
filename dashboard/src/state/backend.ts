/** Where the state comes from: a coordinator, or a simulation. Both feed the same reducer. */

import type { Transport } from "../api/client";
import type { Action } from "./types";

export interface Backend {
  /** Begins to dispatch; the function it returns ends that. */
  start(dispatch: (action: Action) => void): () => void;
  /** Answers what views ask for beside the state: plans, previews, searches, changes. */
  transport: Transport;
}
